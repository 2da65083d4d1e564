"""A worker that is killed: what ran there and what waited there runs elsewhere, soon, and is lost by nobody's death."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.base import wait_at_base
from integration.ledger import Ledger, Line
from integration.rig import CeleryRig
from integration.stores import Server, slow_commands, unsettled
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle"]
#: what a worker logs once it has taken over from a dead one
TAKEN_OVER = r"is gone: \d+ messages"


def seconds_to_restart(ledger: Ledger, killed_at: float, count: int, timeout: float) -> list[float]:
    """Wait for a second start of each of `count` jobs; how long after `killed_at` each was."""
    def again() -> list[Line]:
        first: set[str] = set()
        lines = [line for line in ledger.lines("start") if line.at > killed_at]
        return [line for line in lines if not (line.id in first or first.add(line.id))]

    wait_until(lambda: len(again()) == count, timeout, f"{count} starts after the kill in {ledger.path}", pause=0.05)
    return sorted(line.at - killed_at for line in again())


def test_fifty_held_jobs_start_elsewhere(server: Server, tmp_path: Path, prefix: str) -> None:
    """Rows 1, 8, 10: SIGKILL of a whole worker with 10 running and 40 waiting jobs. With default settings all have
    started elsewhere within 5 s; where death is not proved, with a lease of 5 s, within 5 s after that, and not before
    the lease is over."""
    rigs = {}
    for name, options in {"proof": {}, "lease": {"proof_of_death": False, "visibility_timeout": 5}}.items():
        (tmp_path / name).mkdir()
        rig = rigs[name] = CeleryRig(tmp_path / name, Ledger(tmp_path / name / "ledger.jsonl"), prefix + name)
        rig.use(server.url(), conf={"worker_prefetch_multiplier": 5}, **options)
        rig.send_all("hold", [f"job-{number}" for number in range(50)])
        rig.worker("victim", start=False, concurrency=10, options=QUICK).start(wait=False)
    try:
        for rig in rigs.values():
            rig.workers[0].wait_ready()
            rig.ledger.wait("start", 10, timeout=20)
            rig.wait_stats(in_flight=50, ready=0)
            rig.worker("survivor", start=False, pool="threads", concurrency=50, options=QUICK).start(wait=False)
        for rig in rigs.values():
            rig.workers[1].wait_ready()
            assert len(rig.ledger.ids("start")) == 10
        killed = {}
        for name, rig in rigs.items():
            killed[name] = time.time()
            rig.workers[0].kill()
        proof = seconds_to_restart(rigs["proof"].ledger, killed["proof"], 50, 20)
        lease = seconds_to_restart(rigs["lease"].ledger, killed["lease"], 50, 20)
        for rig in rigs.values():
            rig.flag("release")
            rig.ledger.wait("end", 50, timeout=10)
            assert rig.ledger.verdict().clean
            assert len(rig.ledger.verdict().doubled) == 10
            rig.finish()
        assert proof[-1] < 5
        assert lease[0] > 5 * 2 / 3 - 0.5
        assert lease[-1] < 5 + 5
        wait_at_base(server, prefix)
    finally:
        for rig in rigs.values():
            rig.close()


@pytest.mark.parametrize("rate", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_thousands_come_back_quickly_and_in_small_steps(fresh: Callable[..., Server], celery: CeleryRig,
                                                        ledger: Ledger, rate: int) -> None:
    """Rows 19, 21, 24: 6 000 jobs of a dead worker are free for others at more than 1 000 a second, with a machine of
    their own; no command takes a Redis 50 ms; each runs once more."""
    server = fresh()
    celery.use(server.url(), conf={"worker_prefetch_multiplier": 10_000})
    celery.send("hold", "first")
    celery.worker("victim", pool="threads", concurrency=1, options=QUICK)
    names = celery.send_all("work", [f"job-{number}" for number in range(6000)])
    celery.wait_stats(in_flight=6001, ready=0, timeout=20)
    celery.use(server.url(), conf={"worker_prefetch_multiplier": 100})
    survivors = [celery.worker(f"survivor{number}", start=False, pool="threads", concurrency=2, options=QUICK)
                 for number in (1, 2)]
    celery.start(*survivors)
    with slow_commands(server, 0.05) as slow:
        celery.workers[0].kill()
        # the survivors have their own of them at once
        wait_until(lambda: unsettled(server, celery.prefix) < 6001, 10, "the first come back", pause=0.002)
        began, before = time.monotonic(), unsettled(server, celery.prefix)
        wait_until(lambda: unsettled(server, celery.prefix) <= 2 * 200, 10, "all come back", pause=0.05)
        assert before / (time.monotonic() - began) > rate
        celery.flag("release")
        ledger.wait_ids("end", ["first", *names], 60)
    assert slow == []
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == ["first"]
    celery.finish()
    wait_at_base(server, celery.prefix)


@pytest.mark.usefixtures("at_base")
def test_a_lone_worker_gets_back_its_own(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 6, 7, 10, 74: the only worker is killed and started again at once under its node name, with an exchange
    and a queue that are named apart; it takes back what it had within 5 s, default settings."""
    celery.use(server.url(), conf={"task_default_exchange": "tasks", "task_default_queue": "task_queue",
                                   "task_default_routing_key": "task", "worker_prefetch_multiplier": 10})
    worker = celery.worker(concurrency=1, options=QUICK)
    names = [f"job-{number}" for number in range(10)]
    for name in names:
        celery.send("hold", name)
    ledger.wait("start", 1, timeout=10)
    celery.wait_stats("task_queue", in_flight=10, ready=0)
    worker.kill()
    worker.start()
    ready = time.time()
    celery.flag("release")
    ledger.wait_ids("end", names, 15)
    assert max(line.at for line in ledger.lines("start")) - ready < 5
    assert [line.id for line in ledger.lines("end")] == names
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == ["job-0"]
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_whoever_reclaims_is_killed_too(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 20, 24: again and again the worker that takes over from a dead one is killed as it does; the last one runs
    all."""
    celery.use(server.url(), visibility_timeout=2, delivery_limit=None, conf={"worker_prefetch_multiplier": 100})
    names = celery.send_all("hold", [f"job-{number}" for number in range(500)])
    left = {celery.worker(f"w{number}", start=False, pool="threads", concurrency=1, options=QUICK)
            for number in range(5)}
    celery.start(*left)
    celery.wait_stats(in_flight=500, ready=0)
    victim = celery.workers[0]
    while True:
        left.remove(victim)
        before = {worker: worker.count(TAKEN_OVER) for worker in left}
        victim.kill()
        if len(left) == 1:
            break
        victim = wait_until(lambda before=before: next(
            (worker for worker in left if worker.count(TAKEN_OVER) > before[worker]), None), 15, "somebody takes over")
    celery.flag("release")
    ledger.wait_ids("end", names, 60)
    assert ledger.verdict().clean
    celery.finish()
