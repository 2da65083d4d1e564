"""A delivery stays with its worker while that worker lives: long tasks, blocked loops, frozen processes, lost
connections, restarted servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from integration.base import wait_at_base
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server
from integration.worker import CeleryWorker
from streambroker.testing.faults import Proxy
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]
QUICK = ["--without-mingle"]
#: how many messages wait in a worker, behind the task that runs
WAITING = 3
PREFETCH = {"worker_prefetch_multiplier": 1 + WAITING}


def starts(ledger: Ledger, name: str) -> list[str]:
    """The worker of each start."""
    return [line.worker for line in ledger.starts(name)]


def start_holders(celery: CeleryRig, pools: Sequence[str], task: str) -> list[CeleryWorker]:
    """A worker of each pool with a queue of its own, where one task runs and others wait behind it. They are sent
    first: a solo pool fetches nothing while its task runs."""
    names = {pool: [f"{pool}-{number}" for number in range(1 + WAITING)] for pool in pools}
    for pool in pools:
        celery.send_all(task, names[pool], queue=pool)
    holders = [celery.worker(pool, start=False, pool=pool, concurrency=1, options=[*QUICK, "-Q", pool])
               for pool in pools]
    celery.start(*holders)
    for pool in pools:
        celery.wait_stats(pool, in_flight=1 + WAITING, ready=0)
        celery.ledger.wait_ids("start", names[pool][:1], 10)
    return holders


# ---------------------------------------------------------------- ten leases

LEASE = 1.2


@pytest.fixture(scope="module")
def ten_leases(servers: Callable[[str], Server], kind: str,
               tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """In each pool a task of ten leases with others waiting behind it, and two idle workers that would take them."""
    folder = tmp_path_factory.mktemp("leases")
    celery = CeleryRig(folder, Ledger(folder / "ledger.jsonl"), f"leases-{kind}")
    celery.use(servers(kind).url(), queues=POOLS, visibility_timeout=LEASE,
               conf=PREFETCH)
    try:
        start_holders(celery, POOLS, "block")
        began = time.monotonic()
        celery.start(*(celery.worker(f"idle{number}", start=False, pool="threads", options=QUICK) for number in (1, 2)))
        time.sleep(max(0.0, began + 10 * LEASE - time.monotonic()))
        celery.flag("release")
        celery.ledger.wait("end", len(POOLS) * (1 + WAITING), timeout=20)
        celery.finish()
        yield celery.ledger
    finally:
        celery.close()


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_of_ten_leases_starts_once(ten_leases: Ledger, pool: str) -> None:
    """Rows 1, 11, 13, 17: no lease that runs out under a living worker, whatever its pool, also while its event loop
    stands still."""
    assert starts(ten_leases, f"{pool}-0") == [pool]


@pytest.mark.parametrize("pool", POOLS)
def test_what_waits_in_a_worker_for_ten_leases_stays_there(ten_leases: Ledger, pool: str) -> None:
    """Row 16: fetched and not yet started messages are kept too."""
    assert [starts(ten_leases, f"{pool}-{number}") for number in range(1, 1 + WAITING)] == [[pool]] * WAITING


# ---------------------------------------------------------------- two leases on one queue

@pytest.mark.usefixtures("at_base")
def test_the_holders_lease_counts_where_two_differ(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 5, 6, 12: a worker with a short lease leaves alone what one with a long lease holds, though that is silent
    for some short leases; what a worker with a short lease held comes back after that one; each tells its lease."""
    celery.use(server.url(), visibility_timeout=60, proof_of_death=False)
    patient = celery.worker("patient", start=False, pool="threads", concurrency=1, options=QUICK)
    celery.use(server.url(), visibility_timeout=1.5, proof_of_death=False)
    hasty = celery.worker("hasty", start=False, pool="threads", concurrency=1, options=QUICK)
    celery.start(patient, hasty)
    patient.wait_log("lease 60 s")
    hasty.wait_log("lease 1.5 s")
    for name in ("one", "two"):
        celery.send("hold", name)
    ledger.wait("start", 2, timeout=10)
    [of_patient] = [name for name in ("one", "two") if starts(ledger, name) == ["patient"]]
    [of_hasty] = [name for name in ("one", "two") if starts(ledger, name) == ["hasty"]]
    celery.send("hold", "third", "third")

    patient.freeze()
    time.sleep(4 * 1.5)
    patient.thaw()
    assert [starts(ledger, name) for name in (of_patient, of_hasty, "third")] == [["patient"], ["hasty"], []]
    celery.flag("third")
    hasty.kill()
    killed = time.time()
    celery.flag("release")
    ledger.wait("end", 3, timeout=15)
    again = ledger.starts(of_hasty)[-1]
    assert again.worker == "patient"
    assert again.at - killed < 1.5 + 5
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == [of_hasty]
    celery.finish()


# ---------------------------------------------------------------- silent for a moment

HOLDERS = ["prefork", "threads", "solo"]


def all_ran_once(celery: CeleryRig, timeout: float = 20.0) -> None:
    celery.ledger.wait("end", len(HOLDERS) * (1 + WAITING), timeout)
    for pool in HOLDERS:
        celery.wait_stats(pool, in_flight=0, ready=0, dead=0)
    verdict = celery.ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == []


@pytest.mark.usefixtures("at_base")
def test_a_silence_shorter_than_the_lease_doubles_nothing(server: Server, celery: CeleryRig, ledger: Ledger,
                                                          proxy: Proxy) -> None:
    """Rows 2, 22: with default settings a worker that is stopped for some seconds, whose link hangs, or whose
    connections are all lost for a second, is not taken for dead; a task that ends while the link is down is settled
    over the next one."""
    celery.use(server.url(port=proxy.port), queues=HOLDERS, conf=PREFETCH)
    holders = start_holders(celery, HOLDERS, "hold")
    celery.use(server.url(), queues=HOLDERS)
    celery.worker("idle", pool="threads", options=QUICK)

    for holder in holders:
        holder.freeze()
    time.sleep(4.5)  # two looks, two seconds apart, prove a death
    for holder in holders:
        holder.thaw()
    proxy.hold()
    time.sleep(2)
    proxy.release()
    assert {line.id for line in ledger.lines("start")} == {f"{pool}-0" for pool in HOLDERS}

    proxy.refuse()
    assert proxy.reset() > 0
    time.sleep(1)
    proxy.refuse(False)
    time.sleep(4.5)
    proxy.refuse()
    assert proxy.reset() > 0
    celery.flag("release")
    ledger.wait_ids("end", [f"{pool}-0" for pool in HOLDERS], 10)
    proxy.refuse(False)
    all_ran_once(celery)
    assert all(holder.alive for holder in holders)
    celery.finish()


def test_a_server_that_restarts_doubles_nothing(fresh: Callable[..., Server], celery: CeleryRig) -> None:
    """Rows 22, 29: running tasks survive a server that is killed, one that restarts cleanly, and one that is away for
    longer than the lease."""
    server = fresh(fsync="always")
    celery.use(server.url(), queues=HOLDERS, conf=PREFETCH, visibility_timeout=1.5)
    holders = start_holders(celery, HOLDERS, "hold")
    celery.worker("idle", pool="threads", options=QUICK)
    for hard, away in ((True, 0), (False, 0), (True, 3)):
        server.kill() if hard else server.stop()
        time.sleep(away)
        server.start()
        for holder in holders:
            celery.wait_stats(holder.name, timeout=15, ready=0)
    time.sleep(3 * 1.5)  # whoever were taken for dead would be so by now
    celery.flag("release")
    all_ran_once(celery)
    assert all(holder.alive for holder in holders)
    celery.finish()
    wait_at_base(server, celery.prefix)


def test_tasks_are_cancelled_with_the_connection_where_that_is_asked_for(server: Server, celery: CeleryRig,
                                                                         ledger: Ledger, proxy: Proxy) -> None:
    """Row 23: with `worker_cancel_long_running_tasks_on_connection_loss` what runs is cancelled when Celery is told of
    a lost connection, and runs again; the worker stays."""
    celery.use(server.url(port=proxy.port), reconnect_timeout=0.2,
               conf={"worker_cancel_long_running_tasks_on_connection_loss": True})
    worker = celery.worker(concurrency=2, options=QUICK)
    for name in ("one", "two"):
        celery.send("hold", name)
    first = ledger.wait("start", 2, timeout=10)
    # Celery kills the children
    ledger.killed([line.pid for line in first])
    proxy.refuse()
    proxy.reset()
    time.sleep(1)
    proxy.refuse(False)
    wait_until(lambda: len(ledger.lines("start")) == 4, 15, "both run again")
    celery.flag("release")
    ledger.wait("end", 2, timeout=10)
    celery.wait_stats(in_flight=0, ready=0, dead=0)
    assert worker.alive
    verdict = ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == ["one", "two"]
    celery.finish()
