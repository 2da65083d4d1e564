"""Every pool, one after the other the same story: jobs that wait and are tried again, a lease kept for three leases, a
kill, a stop. All pools live through it at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from celery import VERSION

from integration.base import wait_at_base
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from integration.worker import stop_all
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]
LEASE = 2.0
#: pools whose loop, in Celery before 5.5, fetches one message at a time and forgets at a stop which tasks have ended
#: since: those run again, over every broker
FORGETFUL = ("gevent", "eventlet") if VERSION[:2] < (5, 5) else ()
#: how many messages wait in a worker, behind the task that runs
WAITING = 3


@dataclass(frozen=True)
class Story:
    """`kept`: starts of the jobs that were held when three leases were over. `killed`: when the workers were.
    `idle_stop`, `busy_stop`: seconds by pool. `in_flight`: what a stopped worker left unsettled, by pool."""

    ledger: Ledger
    kept: dict[str, list[str]]
    killed: float
    idle_stop: dict[str, float]
    busy_stop: dict[str, float]
    in_flight: dict[str, int]


@pytest.fixture(scope="module")
def story(servers: Callable[[str], Server], kind: str,
          tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("pools")
    server, ledger = servers(kind), Ledger(folder / "ledger.jsonl")
    celery = CeleryRig(folder, ledger, f"pools-{kind}")
    celery.use(server.url(), queues=POOLS, visibility_timeout=LEASE,
               conf={"worker_prefetch_multiplier": 1 + WAITING})
    workers = {pool: celery.worker(pool, start=False, pool=pool, concurrency=1,
                                   options=["--without-mingle", "-Q", pool]) for pool in POOLS}
    held = {pool: [f"{pool}-held-{number}" for number in range(1 + WAITING)] for pool in POOLS}
    try:
        # jobs that wait
        celery.start(*workers.values())
        for pool in POOLS:
            celery.send("work", f"{pool}-countdown", countdown=1.5, queue=pool)
            celery.send("retrying", f"{pool}-retrying", 2, 0.7, queue=pool)
        ledger.wait("end", 2 * len(POOLS), timeout=15)
        for pool in POOLS:
            celery.wait_stats(pool, in_flight=0)
        idle_stop = dict(zip(POOLS, stop_all(list(workers.values())), strict=True))

        # a lease that is kept; sent before the start, since a solo pool fetches nothing while a task runs
        for pool in POOLS:
            celery.send_all("hold" if pool in FORGETFUL else "block", held[pool], queue=pool)
        celery.start(*workers.values())
        for pool in POOLS:
            celery.wait_stats(pool, in_flight=1 + WAITING, ready=0)
        ledger.wait_ids("start", [names[0] for names in held.values()], 5)
        began = time.monotonic()
        celery.worker("other", pool="threads", concurrency=len(POOLS) * (1 + WAITING), options=["--without-mingle"])
        time.sleep(max(0.0, began + 3 * LEASE - time.monotonic()))
        kept = {pool: [line.worker for name in held[pool] for line in ledger.starts(name)] for pool in POOLS}

        # a kill
        killed = time.time()
        for worker in workers.values():
            worker.kill()
        wait_until(lambda: all(ledger.starts(name)[-1:] and ledger.starts(name)[-1].worker == "other"
                               for names in held.values() for name in names), 20, "all start elsewhere")
        celery.flag("release")
        ledger.wait_ids("end", [name for names in held.values() for name in names], 10)
        celery.workers[-1].stop()

        # a stop while a task runs and others wait
        for pool in POOLS:
            celery.send_all("work", [f"{pool}-last-{number}" for number in range(1 + WAITING)], 1.0, queue=pool)
        celery.start(*workers.values())
        ledger.wait_ids("start", [f"{pool}-last-0" for pool in POOLS], 10)
        busy_stop = dict(zip(POOLS, stop_all(list(workers.values())), strict=True))
        in_flight = {pool: celery.stats(pool).in_flight for pool in POOLS}
        celery.worker("heir", pool="threads", concurrency=10, options=["--without-mingle"])
        ledger.wait_ids("end", [f"{pool}-last-{number}" for pool in POOLS for number in range(1 + WAITING)], 10)
        celery.finish()
        wait_at_base(server, celery.prefix)
        yield Story(ledger, kept, killed, idle_stop, busy_stop, in_flight)
    finally:
        celery.close()


@pytest.mark.parametrize("pool", POOLS)
def test_jobs_wait_for_their_time(story: Story, pool: str) -> None:
    """Row 3: a countdown and retries with a countdown run once, in time."""
    [published] = [line for line in story.ledger.lines("published") if line.id == f"{pool}-countdown"]
    [start] = story.ledger.starts(f"{pool}-countdown")
    assert 0 <= start.at - published.facts["due"] < 1
    attempts = story.ledger.starts(f"{pool}-retrying")
    assert [line.facts["retries"] for line in attempts] == [0, 1, 2]
    assert attempts[2].at - attempts[0].at >= 1.4


@pytest.mark.parametrize("pool", POOLS)
def test_a_lease_is_kept(story: Story, pool: str) -> None:
    """Rows 1, 16: for three leases nobody else gets what runs or waits, though the pool's loop is blocked."""
    assert story.kept[pool] == [pool]


@pytest.mark.parametrize("pool", POOLS)
def test_a_killed_worker_loses_nothing(story: Story, pool: str) -> None:
    """Rows 1, 10, 74: what ran and what waited starts elsewhere within 5 s, once."""
    again = [story.ledger.starts(f"{pool}-held-{number}") for number in range(1 + WAITING)]
    assert [[line.worker for line in lines] for lines in again] == [[pool, "other"]] + [["other"]] * WAITING
    assert max(lines[-1].at for lines in again) - story.killed < 5


@pytest.mark.parametrize("pool", POOLS)
def test_a_stop_is_quick_and_clean(story: Story, pool: str) -> None:
    """Rows 26, 30, 33: an idle worker stops within 5 s; a busy one ends its task, hands back the others, and leaves
    nothing unsettled."""
    assert story.idle_stop[pool] < 5
    assert story.busy_stop[pool] < 1 + 5 + WAITING
    assert story.in_flight[pool] == 0
    if pool not in FORGETFUL:
        assert [len(story.ledger.starts(f"{pool}-last-{number}")) for number in range(1 + WAITING)] == [
            1] * (1 + WAITING)
    assert story.ledger.starts(f"{pool}-last-0")[0].worker == pool


def test_nothing_was_lost_or_doubled(story: Story) -> None:
    verdict = story.ledger.verdict()
    forgotten = {f"{pool}-last-{number}" for pool in FORGETFUL for number in range(1 + WAITING)}
    assert not (verdict.lost or verdict.overlap or verdict.early or verdict.foreign)
    assert {*verdict.unexplained} <= forgotten
    assert {*verdict.doubled} - forgotten == {f"{pool}-held-0" for pool in POOLS}
