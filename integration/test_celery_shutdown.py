"""A worker that is asked to stop: rolling restarts under load, what waits goes to others at once, a soft stop keeps its
leases."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from itertools import cycle, islice

import pytest

from integration.apps.celery_app import LATE
from integration.ledger import Ledger
from integration.load import steady
from integration.rig import CeleryRig
from integration.stores import Server
from integration.worker import CeleryWorker
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle"]
LONG = [pytest.mark.long, pytest.mark.timeout(600)]
EARLY = {"task_acks_late": False, "task_reject_on_worker_lost": False, "worker_prefetch_multiplier": 4}


# ---------------------------------------------------------------- rolling restarts

def load(celery: CeleryRig, rate: float) -> AbstractContextManager[None]:
    """Publish jobs all the while, one in ten of them with a countdown."""
    return steady(rate, lambda number: celery.send(
        "work", f"job-{number}", 0.02, countdown=number % 4 + 1 if number % 10 == 0 else None))


def restart(first: CeleryWorker, second: CeleryWorker) -> None:
    """The first is asked to stop, the second to stop at once; both start again. As a process manager does, kill what
    does not end: when SIGQUIT comes while Celery hands a task to a pool process, its handler waits for ever for that
    process, which waits for the rest of the task."""
    first.ask_to_stop(signal.SIGTERM)
    second.ask_to_stop(signal.SIGQUIT)
    end = time.monotonic() + 6
    for worker in (first, second):
        while worker.alive and time.monotonic() < end:
            time.sleep(0.05)
        worker.kill()
        worker.start(wait=False)
    for worker in (first, second):
        worker.wait_ready()


@pytest.mark.parametrize(("acks", "rounds"), [
    ("late", 5), pytest.param("early", 3, marks=LONG),
    pytest.param("late", 30, marks=LONG), pytest.param("early", 30, marks=LONG)])
@pytest.mark.usefixtures("at_base")
def test_rolling_restarts_under_load_lose_nothing(server: Server, celery: CeleryRig, ledger: Ledger, acks: str,
                                                  rounds: int) -> None:
    """Rows 25, 26, 30, 31: workers stop with SIGTERM and SIGQUIT and start again, two of three at a time, while jobs
    are published and others wait for their time. Late acknowledgement loses nothing and doubles only what a SIGQUIT cut
    short. With early acknowledgement Celery has given up what a SIGQUIT cuts short; nothing else is lost, and nothing
    is doubled."""
    celery.use(server.url(), conf=LATE if acks == "late" else EARLY)
    workers = [celery.worker("prefork", start=False, concurrency=2, options=QUICK),
               celery.worker("threads", start=False, pool="threads", concurrency=2, options=QUICK),
               celery.worker("prefork2", start=False, concurrency=2, options=QUICK)]
    celery.start(*workers)
    with load(celery, 50):
        for pair in islice(zip(cycle(workers), cycle(workers[1:] + workers[:1]), strict=False), rounds):
            restart(*pair)
    wait_until(lambda: celery.stats().delayed == celery.stats().ready == celery.stats().in_flight == 0, 20, "all ran")
    celery.finish()
    if acks == "early":
        cut = {line.facts["target"] for line in ledger.lines("killed")}
        for name in {line.id for line in ledger.lines("start") if line.pid in cut}:
            ledger.given_up(name)
    verdict = ledger.verdict()
    assert verdict.published > 100
    assert verdict.clean
    if acks == "early":
        assert verdict.doubled == []


# ---------------------------------------------------------------- handing back

HOLDERS = ["prefork", "threads", "solo"]


@pytest.mark.usefixtures("at_base")
def test_a_stop_hands_back_what_waits(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 26, 33, 34: others have what waited behind the last task of a worker that stops within 2 s of its end: in
    order, uncounted, and flagged as delivered before."""
    celery.use(server.url(), queues=HOLDERS, conf={"worker_prefetch_multiplier": 10})
    behind = {pool: [f"{pool}-{number}" for number in range(1, 10)] for pool in HOLDERS}
    for pool in HOLDERS:
        celery.send_all("hold", [f"{pool}-0"], queue=pool)
        celery.send_all("work", behind[pool], queue=pool)
    holders = [celery.worker(pool, start=False, pool=pool, concurrency=1,
                             options=[*QUICK, "-Q", pool, "--loglevel", "DEBUG"]) for pool in HOLDERS]
    celery.start(*holders)
    for pool in HOLDERS:
        celery.wait_stats(pool, in_flight=10, ready=0)
    celery.worker("next", pool="threads", concurrency=1, options=QUICK)
    for holder in holders:
        holder.ask_to_stop()
        # a solo worker is told between two tasks
        holder.wait_log("Warm shutdown" if holder.name == "solo" else "Worker: Stopping Pool")
    assert ledger.ids("start") == {f"{pool}-0" for pool in HOLDERS}
    celery.flag("release")
    wait_until(lambda: not any(holder.alive for holder in holders), 15, "all have stopped")
    stopped = time.time()
    ledger.wait("end", 30, timeout=10)
    for pool in HOLDERS:
        passed_on = [line for line in ledger.lines("start") if line.id in behind[pool]]
        assert [line.id for line in passed_on] == behind[pool]
        assert {line.worker for line in passed_on} == {"next"}
        assert passed_on[-1].at < stopped + 2
        assert {(line.facts["headers"]["x-delivery-count"], line.facts["redelivered"])
                for line in passed_on} == {(1, True)}
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == []
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_a_soft_stop_keeps_what_runs(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """While Celery waits for running tasks in its signal handler, with its event loop stopped, for many leases, nobody
    else gets them. What ends in that time has run once; the rest goes to others when it is cut short, uncounted."""
    celery.use(server.url(), visibility_timeout=1, conf={"worker_soft_shutdown_timeout": 4.0})
    soft = celery.worker("soft", concurrency=2, options=QUICK)
    celery.send("hold", "short", "short")
    celery.send("hold", "long")
    ledger.wait("start", 2, timeout=10)
    celery.worker("other", pool="threads", concurrency=2, options=QUICK)
    asked = time.time()
    soft.ask_to_stop(signal.SIGQUIT)
    time.sleep(2.5)
    celery.flag("short")
    ledger.wait_ids("end", ["short"], 1)
    wait_until(lambda: not soft.alive, 15, "the soft stop ends")
    ended = time.time()
    wait_until(lambda: len(ledger.starts("long")) == 2, 5, "somebody else runs the long one")
    again = ledger.starts("long")[-1]
    assert again.worker == "other"
    assert asked + 4 < again.at < ended + 2
    assert (again.facts["headers"]["x-delivery-count"], again.facts["redelivered"]) == (1, True)
    celery.flag("release")
    ledger.wait("end", 2, timeout=5)
    assert len(ledger.starts("short")) == 1
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == ["long"]
    celery.finish()
