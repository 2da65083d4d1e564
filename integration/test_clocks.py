"""Workers whose clocks are an hour wrong: what is due, who lives and who is dead are the store's to say."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from integration.dramatiq_worker import DramatiqRig
from integration.ledger import Ledger, Line
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker.testing.clocks import shifted
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

HOUR = 3600.0
SHIFTS = {"ahead": HOUR, "behind": -HOUR, "right": 0.0}
LEASE = 2.0


def start_all(celery: CeleryRig) -> None:
    celery.start(*(celery.worker(name, start=False, concurrency=4, options=["--without-mingle"],
                                 env=shifted(shift) if shift else None) for name, shift in SHIFTS.items()))


def really(line: Line) -> float:
    """When it was written; its own time is that of a clock that may be wrong."""
    return line.at - SHIFTS[line.worker]


@pytest.mark.usefixtures("at_base")
def test_delays_are_exact_by_the_store(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """A worker that is behind would hold a task for an hour, one that is ahead would start it early."""
    celery.use(server.url())
    start_all(celery)
    due = {}
    for number in range(60):
        name = f"due-{number}"
        due[name] = time.time() + 1.5 + number / 60
        celery.send("work", name, 0.1, countdown=1.5 + number / 60)
    celery.send("retrying", "again", 3, 0.5)
    lines = ledger.wait("end", 61, 20)
    starts = [line for line in ledger.lines("start") if line.id in due]
    assert len(starts) == 60
    assert {line.worker for line in starts} == {*SHIFTS}
    assert all(due[line.id] <= really(line) < due[line.id] + 5.0 for line in starts)
    retries = [really(line) for line in ledger.lines("start") if line.id == "again"]
    assert all(0.5 <= after - before < 5.0 for before, after in pairwise(retries))
    assert len(lines) == 61
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_leases_and_deaths_are_the_stores_too(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Tasks of four leases start once each, and what a killed one had runs elsewhere."""
    celery.use(server.url(), visibility_timeout=LEASE)
    start_all(celery)
    names = celery.send_all("hold", [f"long-{number}" for number in range(12)])
    ledger.wait_ids("start", names, 10)
    until = time.monotonic() + 4 * LEASE
    while time.monotonic() < until:
        assert len(ledger.lines("start")) == 12
        time.sleep(0.2)
    victim = celery.workers[1]
    had = {line.id for line in ledger.lines("start") if line.worker == victim.name}
    assert len(had) == 4
    victim.kill()
    celery.flag("release")
    ledger.wait_ids("end", names, 15)
    again = [line for name in had for line in ledger.starts(name)[1:]]
    assert sorted(line.id for line in again) == sorted(had)
    assert len(ledger.lines("start")) == 16
    celery.finish()


def test_a_worker_of_dramatiq_that_is_behind(server: Server, tmp_path: Path, ledger: Ledger, prefix: str,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays and retries come in their time, to it as to others."""
    rig = DramatiqRig(server, tmp_path, ledger, prefix)
    try:
        for name, value in shifted(-HOUR).items():
            monkeypatch.setenv(name, value)
        rig.command()
        for name in shifted(-HOUR):
            monkeypatch.delenv(name)
        due = time.time() + 1.5
        for number in range(10):
            rig.send("work", f"due-{number}", delay=1500)
        wait_until(lambda: len(ledger.ids("end")) == 10, 10, "all ran")
        starts = [line.at + HOUR for line in ledger.lines("start")]
        assert len(starts) == 10
        assert all(due <= start < due + 5.0 for start in starts)
    finally:
        rig.close()
