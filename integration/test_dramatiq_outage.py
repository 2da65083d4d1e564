"""Dramatiq while its store is away, while nothing happens, and after a death that leaves very much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dramatiq.errors import ConnectionClosed

from integration.dramatiq_worker import DramatiqRig
from integration.ledger import Ledger
from integration.stores import Server, connects, lose_everything, requests
from streambroker.message import Message
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until
from tests.dramatiq_rig import message

Start = Callable[..., tuple[DramatiqRig, Server]]


@pytest.fixture
def start(fresh: Callable[..., Server], tmp_path: Path, ledger: Ledger, prefix: str) -> Iterator[Start]:
    """`start(**options of the broker)` makes a rig on a server of its own."""
    rigs: list[DramatiqRig] = []

    def start(**options: Any) -> tuple[DramatiqRig, Server]:
        server = fresh(fsync="always")
        rigs.append(DramatiqRig(server, tmp_path, ledger, prefix, **options))
        return rigs[-1], server

    yield start
    for rig in rigs:
        rig.close()


def outage(rig: DramatiqRig, server: Server, seconds: float) -> None:
    """What runs, waits and is retried goes on by itself; few words are lost about it."""
    command = rig.command(threads=3)
    rig.send("hold", "running")
    rig.send("work", "before")
    rig.send("work", "later", delay=int(seconds * 1000) - 1000)
    due = time.time() + seconds - 1
    rig.wait("start", "running")
    rig.wait("end", "before")
    written = len(command.log.read_text().splitlines())
    server.kill()
    with pytest.raises(ConnectionClosed):
        rig.send("work", "refused")
    time.sleep(max(0.0, due + 1 - time.time()))
    server.start()
    back = time.time()
    wait_until(lambda: rig.broker.engine.ping() > 0, 10, "the store is back")
    rig.send("work", "after")
    rig.wait("end", "later", "after", seconds=15)
    assert due <= rig.ledger.starts("later")[0].at < back + 10
    assert rig.ledger.starts("after")[0].at < back + 10
    rig.flag("release")
    rig.wait("end", "running")
    rig.broker.join("default", timeout=10_000)
    assert [len(rig.ledger.starts(job)) for job in ("running", "before", "later", "after", "refused")] == [
        1, 1, 1, 1, 0]
    said = command.log.read_text().splitlines()[written:]
    assert len(said) < 30, "\n".join(said)
    assert not [line for line in said if "Traceback" in line]


def test_the_store_is_away(start: Start) -> None:
    """Rows 117, 125, 126, 139: longer than the engine mends links by itself."""
    outage(*start(publish_timeout=500), seconds=8)


@pytest.mark.long
@pytest.mark.stores
def test_the_store_is_away_for_a_minute(start: Start) -> None:
    """Row 126."""
    outage(*start(publish_timeout=500, visibility_timeout=120_000), seconds=60)


@pytest.mark.stores
def test_what_a_process_has_outlives_a_store_that_loses_everything(start: Start) -> None:
    """Nobody else has it then: not only what runs is finished, what waits in the process is started too."""
    rig, server = start(visibility_timeout=3000)
    rig.command(threads=1)
    rig.send("hold", "running")
    rig.wait("start", "running")
    rig.send("work", "waits")
    wait_until(lambda: rig.broker.engine.inspector().stats("default").in_flight == 2, 10, "the process has both")
    lose_everything(server, rig.settings["options"]["prefix"])
    time.sleep(2 * 3)  # two leases
    rig.flag("release")
    rig.wait("end", "running", "waits")
    assert [len(rig.ledger.starts(job)) for job in ("running", "waits")] == [1, 1]
    rig.send("work", "after")
    rig.wait("end", "after")


@pytest.mark.long
@pytest.mark.stores
def test_an_idle_process_asks_for_little(start: Start) -> None:
    """Row 116: one process, 8 threads, 2 queues, a minute. (A nats-server: plain messages, too.)"""
    rig, server = start()
    rig.command(threads=8)
    rig.send("work", "first")
    rig.wait("end", "first")
    time.sleep(21)  # what follows a start: a search for lost answers
    opened, seconds = connects(server), 60
    sent = requests(server, seconds)
    assert sent <= seconds * (3 if isinstance(server, NatsServer) else 2)
    assert connects(server) - opened <= 3


@pytest.mark.long
@pytest.mark.stores
@pytest.mark.timeout(400)
def test_twenty_thousand_of_one_dead_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 118: all are recovered, each once."""
    rig, _ = start()
    count = 20_000
    monkeypatch.setenv("dramatiq_queue_prefetch", str(count + 8))
    doomed = rig.command(threads=1)
    monkeypatch.delenv("dramatiq_queue_prefetch")
    rig.send("hold", "first")
    rig.wait("start", "first")
    for first in range(0, count, 500):
        rig.broker.engine.publish("default", [Message(message(f"job-{number}", actor="ends").encode())
                                              for number in range(first, first + 500)])
    stats = rig.broker.engine.inspector().stats
    wait_until(lambda: stats("default").in_flight == count + 1, 60, "one process has all", pause=0.5)
    rig.command(threads=8)
    doomed.kill()
    killed = time.time()
    rig.flag("release")
    wait_until(lambda: len(rig.ledger.ids("end")) == count + 1, 120, "all ran", pause=1.0)
    assert len(rig.ledger.lines("end")) == count + 1
    first = min(line.at for line in rig.ledger.lines("end"))
    assert first - killed < 35
    rig.broker.join("default", timeout=10_000)
