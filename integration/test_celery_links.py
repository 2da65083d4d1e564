"""Trouble between workers and store, and in the store: the same worker processes go on by themselves, soon after it is
over and without a flood in their logs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from kombu.exceptions import OperationalError

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server, can_be_full, full, lose_everything, lose_stream, make_server
from integration.worker import CeleryWorker
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

POOLS = ["prefork", "threads", "gevent"]
#: how soon after its end a trouble must be over
SOON = 10.0
LEASE = 4.0
#: lines that one trouble may cost in the log of a worker
LINES = 10


@dataclass
class Crew:
    """A server of their own, a proxy in front of it, and a worker of each pool with a queue of its own and a shared
    one; this process publishes past the proxy."""

    server: Server
    proxy: Proxy
    rig: CeleryRig
    workers: dict[str, CeleryWorker]
    counter: int = 0

    def marks(self) -> dict[str, int]:
        return {pool: len(worker.text()) for pool, worker in self.workers.items()}

    def send(self, pools: list[str] | None = None, task: str = "work", *args: object) -> list[str]:
        self.counter += 1
        names = []
        for pool in pools or POOLS:
            self.rig.send(task, f"{pool}-{self.counter}", *args, queue=pool)
            names.append(f"{pool}-{self.counter}")
        return names

    def work_again(self, within: float = SOON) -> None:
        """One task on each queue and an answer of each worker, within that time from now on."""
        began = time.monotonic()
        self.rig.ledger.wait_ids("end", self.send(), within)
        wait_until(lambda: len(self.rig.app.control.ping(timeout=1, limit=len(POOLS))) == len(POOLS),
                   max(0.1, began + within - time.monotonic()), "an answer of each worker")

    def told(self, before: dict[str, int]) -> dict[str, list[str]]:
        """What each worker has logged since, lines of tasks excepted."""
        return {pool: [line for line in worker.text()[before[pool]:].splitlines() if not re.search(r"Task \w+\[", line)]
                for pool, worker in self.workers.items()}

    def few_words(self, before: dict[str, int], most: int = LINES, more: int = 0) -> None:
        """At most `most` lines in each log; `more` under gevent."""
        for pool, lines in self.told(before).items():
            most += more if pool == "gevent" else 0
            assert len(lines) <= most, f"{pool} wrote {len(lines)} lines:\n" + "\n".join(lines[:200])


@pytest.fixture(scope="module")
def shared_crew(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("links")
    rig = CeleryRig(folder, Ledger(folder / "ledger.jsonl"), "links")
    with make_server(kind, **can_be_full(kind)) as server, Proxy(server.port) as proxy:
        rig.use(server.url(port=proxy.port), queues=[*POOLS, "shared"], visibility_timeout=LEASE)
        workers = {pool: rig.worker(pool, start=False, pool=pool, options=["-Q", f"{pool},shared"]) for pool in POOLS}
        rig.use(server.url(), queues=[*POOLS, "shared"], visibility_timeout=LEASE, publish_timeout=2)
        try:
            rig.start(*workers.values())
            yield Crew(server, proxy, rig, workers)
        finally:
            rig.close()


@pytest.fixture
def crew(shared_crew: Crew) -> Iterator[Crew]:
    """The crew, at work before and after the test, in the same processes."""
    for worker in shared_crew.workers.values():
        if not worker.alive:
            worker.end()
            worker.start()
    shared_crew.work_again()
    before = {worker: (worker.pid, worker.starts) for worker in shared_crew.workers.values()}
    yield shared_crew
    assert {worker: (worker.pid, worker.starts) for worker in before if worker.alive} == before
    queues = [*POOLS, "shared"]
    wait_until(lambda: not any(shared_crew.rig.stats(queue).in_flight for queue in queues), 10, "nothing in flight")
    verdict = shared_crew.rig.ledger.verdict()
    assert verdict.clean and not verdict.doubled


# ---------------------------------------------------------------- the server goes away

def restarts(crew: Crew, times: int) -> None:
    for number in range(times):
        before = crew.marks()
        crew.server.restart(hard=bool(number % 2))
        crew.work_again()
        crew.few_words(before)


def test_the_server_restarts(crew: Crew) -> None:
    """Row 43: with mingle, gossip and heartbeats on, cleanly and killed."""
    restarts(crew, 4)


@pytest.mark.long
def test_the_server_restarts_twenty_times(crew: Crew) -> None:
    restarts(crew, 20)


def outage(crew: Crew, seconds: float, most: int) -> None:
    """Celery tells of each of its tries, and gevent of the mailbox's greenlet, which ends with a long traceback."""
    before = crew.marks()
    crew.server.stop()
    time.sleep(seconds)
    crew.server.start()
    crew.work_again()
    crew.few_words(before, most, more=120)


def test_the_server_is_away(crew: Crew) -> None:
    """Row 50: longer than the engine mends links by itself, so that Celery does it."""
    outage(crew, 8, 40)


@pytest.mark.long
def test_the_server_is_away_for_a_minute(crew: Crew) -> None:
    outage(crew, 60, 80)


# ---------------------------------------------------------------- connections go away

def kill_all(crew: Crew) -> None:
    """By the server where it can, else on the way to it."""
    if isinstance(crew.server, NatsServer):
        crew.proxy.reset()
        return
    with crew.server.client() as client:
        client.client_kill_filter(_type="normal")
        client.client_kill_filter(_type="pubsub")


def kills(crew: Crew, seconds: int) -> None:
    before = crew.marks()
    for _ in range(seconds):
        kill_all(crew)
        time.sleep(1)
    crew.work_again()
    names = [name for _ in range(10) for name in crew.send()]
    crew.rig.ledger.wait_ids("end", names, SOON)
    crew.few_words(before)


def test_all_connections_are_killed_every_second(crew: Crew) -> None:
    """Rows 44, 45."""
    kills(crew, 4)


@pytest.mark.long
def test_all_connections_are_killed_every_second_for_half_a_minute(crew: Crew) -> None:
    kills(crew, 30)


def test_connections_are_killed_during_the_start(crew: Crew) -> None:
    """Row 44."""
    settings = crew.rig.settings
    crew.rig.settings = replace(settings, broker=crew.server.url(port=crew.proxy.port))
    late = crew.rig.worker("late", start=False, options=["-Q", "late"])
    crew.rig.settings = settings
    late.start(wait=False)
    try:
        for _ in range(15):
            kill_all(crew)
            time.sleep(0.2)
        late.wait_ready()
        crew.rig.send("work", "late", queue="late")
        crew.rig.ledger.wait_ids("end", ["late"], SOON)
    finally:
        late.stop()


def test_half_open_connections(crew: Crew) -> None:
    """Rows 47, 48, 54: nothing comes through and nobody says so, on the connections that there are. It is noticed
    within half a minute, for tasks and for remote commands."""
    before = crew.marks()
    crew.proxy.freeze()
    try:
        crew.work_again(within=30)
    finally:
        crew.proxy.release()
    crew.work_again()
    crew.few_words(before)


def hang(crew: Crew, seconds: float, lines: int) -> None:
    before = crew.marks()
    names = crew.send(None, "work", 1.0)
    crew.rig.ledger.wait_ids("start", names, SOON)
    crew.proxy.hold()
    time.sleep(seconds)
    crew.proxy.release()
    crew.rig.ledger.wait_ids("end", names, SOON)
    crew.work_again()
    # a nats-server's link that says nothing for a good part of a lease is given up, and Celery told
    crew.few_words(before, max(lines, 3 * LINES if isinstance(crew.server, NatsServer) else 0), more=120)


def test_the_link_hangs(crew: Crew) -> None:
    """Longer than any answer is waited for, also while tasks end."""
    hang(crew, 12, LINES)


@pytest.mark.long
def test_the_link_hangs_for_a_minute(crew: Crew) -> None:
    # Celery tells of each try to connect in three lines, and of a change in its version 5.1 in nine
    hang(crew, 60, 4 * LINES)


# ---------------------------------------------------------------- the store loses data

def test_everything_is_flushed_while_the_workers_are_idle(crew: Crew) -> None:
    """Queues, groups, bindings, workers and scripts, streams and consumers are made again."""
    before = crew.marks()
    lose_everything(crew.server, "links")
    crew.work_again()
    wait_until(lambda: {*POOLS} <= {*crew.rig.engine.inspector().queues()}, SOON, "the queues are listed")
    wait_until(lambda: len(crew.rig.engine.inspector().workers()) == len(POOLS), SOON, "the workers are listed")
    crew.few_words(before)


def test_a_stream_is_deleted(crew: Crew) -> None:
    """Row 57: while its worker waits for it; the others do not notice."""
    before = crew.marks()
    if isinstance(crew.server, NatsServer):
        lose_stream(crew.server, "links")
    else:
        with crew.server.client() as client:
            assert client.delete(*(f"links:{{{pool}}}:s:0" for pool in POOLS)) == len(POOLS)
    crew.work_again()
    crew.few_words(before)


# ---------------------------------------------------------------- the store refuses

def test_the_store_is_full(crew: Crew) -> None:
    """Row 53: acknowledgements pass, they make room; leases are kept, also where others would take them; publishers
    are told."""
    before = crew.marks()
    names = crew.send([*POOLS, "shared"], "hold", "room")
    crew.rig.ledger.wait_ids("start", names, SOON)
    with full(crew.server, "links") as refusal:
        with pytest.raises(OperationalError, match=refusal):
            crew.rig.app.tasks["work"].apply_async(("refused",), queue="shared", retry=False)
        time.sleep(2 * LEASE)
        crew.rig.flag("room")
        crew.rig.ledger.wait_ids("end", names, SOON)
        wait_until(lambda: not any(crew.rig.stats(pool).in_flight for pool in POOLS), 5, "acknowledged")
    crew.work_again()
    crew.few_words(before)
    assert "refused" not in crew.rig.ledger.ids("start")


@pytest.mark.only_on("redis", "a nats-server without its replicas has no leader: see the cluster's tests")
def test_writes_are_refused(crew: Crew) -> None:
    """Row 52: as a primary without its replicas does; what ends meanwhile is acknowledged afterwards."""
    before = crew.marks()
    with crew.server.client() as client:
        names = crew.send([*POOLS, "shared"], "hold", "writes")
        crew.rig.ledger.wait_ids("start", names, SOON)
        client.config_set("min-replicas-to-write", "1")
        try:
            with pytest.raises(OperationalError, match="NOREPLICAS"):
                crew.rig.app.tasks["work"].apply_async(("refused",), queue="shared", retry=False)
            time.sleep(LEASE)
            crew.rig.flag("writes")
            crew.rig.ledger.wait_ids("end", names, SOON)
            time.sleep(LEASE)
        finally:
            client.config_set("min-replicas-to-write", "0")
    crew.work_again()
    crew.few_words(before)
    assert "refused" not in crew.rig.ledger.ids("start")
