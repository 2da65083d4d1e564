"""How many messages a worker has at a time, and what that costs."""

from __future__ import annotations

import time

import pytest

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle"]


@pytest.mark.usefixtures("at_base")
def test_a_worker_takes_what_it_can_start(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 85, 86: late acknowledgement, multiplier 1. Of two jobs that are due at once a worker with one process has
    one; of twenty that are ready one with two has two; the rest is free for others."""
    celery.use(server.url(), queues=["due", "many"])
    workers = [celery.worker("one", start=False, concurrency=1, options=[*QUICK, "-Q", "due"]),
               celery.worker("two", start=False, concurrency=2, options=[*QUICK, "-Q", "many"])]
    celery.start(*workers)
    for number in range(2):
        celery.send("hold", f"due-{number}", countdown=1, queue="due")
    celery.send_all("hold", [f"many-{number}" for number in range(20)], queue="many")
    ledger.wait("start", 3, 10)
    celery.wait_stats("due", delayed=0, in_flight=1, ready=1, timeout=5)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for queue, held, ready in (("due", 1, 1), ("many", 2, 18)):
            stats = celery.stats(queue)
            assert (stats.in_flight, stats.ready) == (held, ready)
    reserved = celery.app.control.inspect(timeout=2).reserved()
    assert sorted(len(rows) for rows in reserved.values()) == [0, 0]
    celery.flag("release")
    ledger.wait("end", 22, 20)
    assert ledger.verdict().clean
    celery.finish()


def test_late_acknowledgement_keeps_no_job_waiting(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Row 88: fifty empty jobs, one process, late acknowledgement, multiplier 1, within 1.5 s."""
    celery.use(server.url())
    names = celery.send_all("work", [f"job-{number}" for number in range(50)])
    celery.worker(concurrency=1, options=QUICK)
    ledger.wait_ids("end", names, 10)
    assert ledger.lines("end")[-1].at - ledger.lines("start")[0].at < 1.5
    celery.finish()
