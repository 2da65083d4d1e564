"""Dramatiq under load: rolling restarts, and tens of thousands of delays that end in one second.

    pytest integration/test_dramatiq_load.py -m long --session-timeout 14400
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import redis

from integration.dramatiq_worker import DramatiqCommand, DramatiqRig
from integration.ledger import Ledger
from integration.load import steady
from integration.stores import Server
from streambroker.message import Message
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until
from tests.dramatiq_rig import message

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL)


@pytest.fixture
def rig(server: Server, tmp_path: Path, ledger: Ledger, prefix: str) -> Iterator[DramatiqRig]:
    made = DramatiqRig(server, tmp_path, ledger, prefix)
    yield made
    made.close()


def load(rig: DramatiqRig, rate: float) -> AbstractContextManager[None]:
    """Publish jobs all the while, one in ten of them with a delay."""
    def send(number: int) -> None:
        delay = (number % 4 + 1) * 1000 if number % 10 == 0 else None
        rig.send("work", f"job-{number}", 0.02, delay=delay)

    return steady(rate, send)


def restart(rig: DramatiqRig, command: DramatiqCommand, number: signal.Signals) -> DramatiqCommand:
    """What runs in its place."""
    if number == signal.SIGHUP:
        command.reload()
        return command
    if number == signal.SIGKILL:
        command.kill()
    else:
        command.stop()
    return rig.command(threads=4)


def roll(rig: DramatiqRig, rounds: int) -> None:
    commands = [rig.command(threads=4) for _ in range(3)]
    with load(rig, 50):
        for turn in range(rounds):
            # each signal meets each command
            place = (turn + turn // 3) % 3
            commands[place] = restart(rig, commands[place], SIGNALS[turn % 3])
    rig.broker.join("default", timeout=60_000)
    verdict = rig.ledger.verdict()
    assert verdict.clean, verdict
    assert verdict.published == verdict.ended > 100
    assert rig.broker.get_queue_message_counts("default") == (0, 0, 0)
    for command in commands:
        command.stop()
    wait_until(lambda: rig.broker.engine.inspector().workers() == [], 10, "no record of them is left")


def test_a_few_rolling_restarts_lose_nothing(rig: DramatiqRig) -> None:
    roll(rig, 3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.stores
def test_a_hundred_rolling_restarts_lose_nothing(rig: DramatiqRig) -> None:
    roll(rig, 100)


def slowest_command(server: Server) -> float:
    """Seconds that the longest command of a Redis took since `reset_slowest`; a nats-server has no such thing."""
    if isinstance(server, NatsServer):
        return 0.0
    with redis.Redis(port=server.port) as client:
        return max((entry["duration"] for entry in client.slowlog_get(128)), default=0) / 1e6


def reset_slowest(server: Server) -> None:
    if not isinstance(server, NatsServer):
        with redis.Redis(port=server.port) as client:
            client.config_set("slowlog-log-slower-than", 20_000)
            client.slowlog_reset()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.stores
def test_a_flood_that_is_due_in_one_second(rig: DramatiqRig, server: Server) -> None:
    """Neither is the server blocked nor does a worker's memory grow."""
    # a nats-server's own schedules come some hundreds a second
    count = 10_000 if isinstance(server, NatsServer) else 50_000
    reset_slowest(server)
    command = rig.command(threads=8)
    worker = psutil.Process(command.pids()[-1])
    due = time.time() + 40  # what publishing may take
    before = worker.memory_info().rss
    for start in range(0, count, 500):
        rig.broker.engine.publish("default", [
            Message(message(f"job-{number}", actor="ends").encode(), delay=due + number / count - time.time())
            for number in range(start, start + 500)])
    assert time.time() < due
    waiting = rig.broker.get_queue_message_counts("default")[1]
    grown = worker.memory_info().rss - before
    assert waiting == count
    wait_until(lambda: len(rig.ledger.ids("end")) == count, due - time.time() + 120, "all ran", pause=1.0)
    assert min(line.at for line in rig.ledger.lines("end")) >= due
    assert len(rig.ledger.lines("end")) == count
    grown = max(grown, worker.memory_info().rss - before)
    assert grown < 20e6
    assert slowest_command(server) < 0.05
    rig.broker.join("default", timeout=10_000)
