"""Countdowns, etas and retry delays wait in the store: in no worker's memory, for any time, never early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest

from integration.base import wait_at_base
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from streambroker.message import QueueStats
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle"]

# ---------------------------------------------------------------- in time

DELAY = 3.0
COUNTDOWNS = 150


@dataclass(frozen=True)
class Waits:
    """What came of some waiting jobs. `meanwhile`: the queue while they waited."""

    ledger: Ledger
    meanwhile: QueueStats


@pytest.fixture(scope="module")
def waits(servers: Callable[[str], Server], kind: str,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waits]:
    """Jobs with a countdown, an eta with and without a zone, and retries that wait, on two workers with a lease shorter
    than the delays."""
    folder = tmp_path_factory.mktemp("waits")
    celery = CeleryRig(folder, Ledger(folder / "ledger.jsonl"), f"waits-{kind}")
    celery.use(servers(kind).url(), visibility_timeout=1.5)
    try:
        celery.start(celery.worker("prefork", start=False, concurrency=2, options=QUICK),
                     celery.worker("threads", start=False, pool="threads", concurrency=2, options=QUICK))
        for number in range(COUNTDOWNS):
            celery.send("work", f"countdown-{number}", countdown=DELAY + number * 0.02)
        due = datetime.now(timezone.utc) + timedelta(seconds=DELAY)
        work = celery.app.tasks["work"]
        # Celery takes an eta without a zone as one of the application's, here UTC
        for name, eta in (("aware", due.astimezone(timezone(timedelta(hours=5)))), ("naive", due.replace(tzinfo=None))):
            work.apply_async((name,), eta=eta)
            celery.ledger.published(name, due.timestamp())
        celery.send("retrying", "retrying", 3, 1.0)
        wait_until(lambda: len(celery.ledger.starts("retrying")) == 2, 10, "the first retry")
        meanwhile = celery.stats()
        celery.ledger.wait("end", COUNTDOWNS + 3, timeout=20)
        celery.finish()
        yield Waits(celery.ledger, meanwhile)
    finally:
        celery.close()


def test_jobs_wait_in_the_store(waits: Waits) -> None:
    """Rows 3, 84: not in a worker, where they would be lost, hoarded, or copied after each lease. (A worker has to look
    at an eta without a zone itself.)"""
    assert waits.meanwhile.delayed >= COUNTDOWNS + 1
    assert waits.meanwhile.in_flight <= 2


def test_waiting_jobs_run_once_and_never_early(waits: Waits) -> None:
    """Rows 3, 4, 9: though they wait for several leases."""
    verdict = waits.ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == []


def test_retries_wait(waits: Waits) -> None:
    """Attempts 1 to 4 of one job, each a second after the one before it."""
    attempts = waits.ledger.starts("retrying")
    assert [line.facts["retries"] for line in attempts] == [0, 1, 2, 3]
    gaps = [later.at - earlier.at for earlier, later in pairwise(attempts)]
    assert all(1.0 <= gap < 1.5 for gap in gaps), gaps


def test_due_jobs_start_within_a_quarter_second(waits: Waits) -> None:
    """p99, on workers with nothing else to do; the store and this test have one clock."""
    due = {line.id: line.facts["due"] for line in waits.ledger.lines("published")}
    late = sorted(line.at - due[line.id] for line in waits.ledger.lines("start") if line.id.startswith("countdown"))
    assert late[round(len(late) * 0.99) - 1] < 0.25, late[-5:]
    for name in ("aware", "naive"):
        assert waits.ledger.starts(name)[0].at - due[name] < 1


# ---------------------------------------------------------------- many, and far away

@pytest.mark.parametrize("count", [5000, pytest.param(50_000, marks=pytest.mark.long)])
@pytest.mark.usefixtures("at_base")
def test_a_flood_of_delays_costs_workers_nothing(server: Server, celery: CeleryRig, ledger: Ledger,
                                                 count: int) -> None:
    """Rows 83, 100: thousands of far jobs leave a worker's memory as it was and immediate jobs quick; a purge counts
    and removes them with what is ready, and leaves what a worker has."""
    celery.use(server.url(), conf={"worker_prefetch_multiplier": 5})
    worker = celery.worker(pool="threads", concurrency=2, options=QUICK)
    celery.send_all("work", [f"warm-{number}" for number in range(500)])
    ledger.wait("end", 500, timeout=20)
    before = worker.memory()
    work = celery.app.tasks["work"]
    sent = time.time()
    far = work.apply_async(("far",), countdown=60 * 86400)
    celery.send_all("hold", [f"flood-{number}" for number in range(count)], countdown=600)
    for number in range(20):
        celery.send("work", f"now-{number}")
        ledger.wait_ids("end", [f"now-{number}"], 2)
    assert celery.wait_stats(in_flight=0, ready=0).delayed == count + 1
    assert worker.memory() - before < 20e6
    [waiting] = [each for each in celery.engine.inspector().delayed("celery") if each.message.id == far.id]
    assert abs(waiting.due - sent - 60 * 86400) < 5

    celery.send_all("hold", [f"held-{number}" for number in range(10)])
    celery.wait_stats(in_flight=10, ready=0)
    celery.send_all("hold", [f"ready-{number}" for number in range(50)])
    assert celery.app.control.purge() == 50 + count + 1
    stats = celery.stats()
    assert (stats.ready, stats.delayed, stats.in_flight) == (0, 0, 10)
    celery.flag("release")
    ledger.wait_ids("end", [f"held-{number}" for number in range(10)], 10)
    assert not any(line.id.startswith(("ready", "flood", "far")) for line in ledger.lines("start"))
    celery.finish()


# ---------------------------------------------------------------- through thick and thin

def test_waiting_jobs_survive_everybody(fresh: Callable[..., Server], celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 4, 25, 28: all workers and the server are killed while jobs wait; each runs once, none early."""
    server = fresh(fsync="always")
    celery.use(server.url(), visibility_timeout=2)
    workers = [celery.worker(f"w{number}", start=False, pool="threads", concurrency=2, options=QUICK)
               for number in (1, 2)]
    celery.start(*workers)
    for number in range(30):
        celery.send("work", f"job-{number}", countdown=5 + number * 0.1)
    for worker in workers:
        worker.kill()
    server.restart(hard=True)
    assert celery.stats().delayed == 30
    celery.start(*workers)
    ledger.wait("end", 30, timeout=20)
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == []
    celery.wait_stats(in_flight=0, ready=0, delayed=0, dead=0)
    wait_until(lambda: len(celery.engine.inspector().workers()) == 2, 10, "the dead are forgotten")
    celery.finish()
    wait_at_base(server, celery.prefix)


@pytest.mark.usefixtures("at_base")
def test_due_jobs_are_released_while_every_worker_is_busy(server: Server, celery: CeleryRig,
                                                          ledger: Ledger) -> None:
    """Row 85: a full prefetch and a blocked loop keep nobody's job waiting in the delays, and nothing is fetched beyond
    the prefetch; a second worker takes them."""
    celery.use(server.url())
    celery.send("hold", "busy")
    celery.worker("busy", pool="solo", options=QUICK)
    ledger.wait("start", 1, timeout=10)
    for name in ("one", "two"):
        celery.send("work", name, countdown=1)
    celery.wait_stats(delayed=2, in_flight=1)
    celery.wait_stats(delayed=0, ready=2, in_flight=1, timeout=3)
    celery.worker("idle", pool="threads", options=QUICK)
    ledger.wait_ids("end", ["one", "two"], 5)
    assert {line.worker for name in ("one", "two") for line in ledger.starts(name)} == {"idle"}
    celery.flag("release")
    ledger.wait("end", 3, timeout=5)
    assert ledger.verdict().clean
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_revoked_jobs_leave_the_store(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 102, 103, 104: a waiting job that is revoked is dropped from the store, without any worker up and with
    several, and runs nowhere; others of its time do."""
    celery.use(server.url())
    alone = celery.app.tasks["work"].apply_async(("revoked-alone",), countdown=4)
    celery.send("work", "kept-alone", countdown=4.1)
    celery.app.control.revoke(alone.id)
    celery.wait_stats(delayed=1)
    celery.start(*(celery.worker(f"w{number}", start=False, pool="threads", options=QUICK) for number in (1, 2)))
    watched = celery.app.tasks["work"].apply_async(("revoked-watched",), countdown=1.5)
    celery.send("work", "kept-watched", countdown=1.6)
    before = celery.stats().delayed
    celery.app.control.revoke(watched.id)
    wait_until(lambda: celery.stats().delayed < before, 5, "the count falls")
    ledger.wait_ids("end", ["kept-alone", "kept-watched"], 10)
    assert ledger.ids("start") == {"kept-alone", "kept-watched"}
    assert ledger.verdict().clean
    celery.finish()
