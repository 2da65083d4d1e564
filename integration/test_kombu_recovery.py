"""Plain Kombu, without any event loop: who only waits for messages still gets those of the dead."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import pytest
from kombu import Connection

from integration.stores import Server
from integration.worker import ROOT

#: takes a message and never settles it
HOLDER = """
import json, sys, time, streambroker
from kombu import Connection
with Connection(sys.argv[1], transport_options=json.loads(sys.argv[2])) as connection:
    message = connection.SimpleQueue("orphans").get(timeout=10)
    print(message.payload, flush=True)
    time.sleep(600)
"""


def simple_queue(connection: Connection) -> Callable[[], Any]:
    queue = connection.SimpleQueue("orphans")

    def get() -> Any:
        try:
            return queue.get(timeout=0.2)
        except Empty:
            return None

    return get


def basic_get(connection: Connection) -> Callable[[], Any]:
    channel = connection.default_channel

    def get() -> Any:
        time.sleep(0.1)
        message = channel.basic_get("orphans")
        return None if message is None else channel.message_to_python(message)

    return get


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("way", [simple_queue, basic_get])
@pytest.mark.parametrize(("options", "limit"), [
    ({}, 5.0), ({"proof_of_death": False, "visibility_timeout": 3}, 3.0 + 5)], ids=["proof", "lease"])
def test_a_plain_loop_gets_what_a_killed_consumer_held(
        server: Server, prefix: str, holders: list[subprocess.Popen[str]], options: dict[str, Any], limit: float,
        way: Callable[[Connection], Callable[[], Any]]) -> None:
    """Row 110."""
    settings = {"global_keyprefix": prefix, **options}
    with Connection(server.url(), transport_options=settings) as connection:
        connection.SimpleQueue("orphans").put({"number": 1})
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, server.url(), json.dumps(settings)], text=True,
                                  stdout=subprocess.PIPE, cwd=ROOT)
        holders.append(holder)
        assert holder.stdout is not None and "number" in holder.stdout.readline()
        get = way(connection)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert get() is None
        holder.kill()
        began = time.monotonic()
        while (message := get()) is None:
            assert time.monotonic() - began < limit
        assert message.payload == {"number": 1}
        assert message.delivery_info["redelivered"]
        message.ack()
        while time.monotonic() < until + 1:
            assert get() is None
