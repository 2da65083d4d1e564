"""Hostile messages through the Kombu adapter: each costs itself alone."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from kombu import Connection, Queue

from integration.stores import Server
from streambroker import connect
from streambroker.message import Message

GOOD = b'{"content_type":"application/json","content_encoding":"utf-8"}'
HOSTILE = {
    "headers that are a list": b'{"headers":[1,2]}',
    "headers that are a number": b'{"headers":5}',
    "properties that are a text": b'{"properties":"x"}',
    "brackets without end": b'{"headers":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a date that is none": b'{"headers":{"x":{"__type__":"datetime","__value__":3}}}',
    "a uuid that is none": b'{"headers":{"x":{"__type__":"uuid","__value__":5}}}',
    "a decimal that is none": b'{"headers":{"x":{"__type__":"decimal","__value__":"zz"}}}',
    "a type that is no name": b'{"headers":{"x":{"__type__":{"a":1},"__value__":5}}}',
    "a head that is a uuid": b'{"__type__":"uuid","__value__":"zz"}',
}


def options(prefix: str, **more: Any) -> dict[str, Any]:
    return {"global_keyprefix": prefix, **more}


def drained(connection: Connection, queue: str) -> list[Any]:
    """Bodies of what comes within half a second, acknowledged."""
    got: list[Any] = []

    def take(body: Any, message: Any) -> None:
        got.append(body)
        message.ack()

    with connection.Consumer([Queue(queue)], callbacks=[take], accept=["json"]):
        while True:
            try:
                connection.drain_events(timeout=0.5)
            except socket.timeout:  # noqa: UP041  Kombu's own name for it
                return got


@pytest.mark.parametrize("head", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_head_that_cannot_be_read_is_a_dead_letter(server: Server, prefix: str, head: bytes) -> None:
    engine = connect(server.url(), prefix=prefix)
    engine.publish("q", [Message(b"1", head), Message(b"2", GOOD)])
    with Connection(server.url(), transport_options=options(prefix)) as connection:
        assert drained(connection, "q") == [2]
        letter, = engine.inspector().dead("q")
        assert letter.reason.startswith("undecodable head: ")
        assert letter.message.body == b"1"
    engine.close()
