"""Kombu connections on a memory store of their own, for the tests of the adapter."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection

from streambroker.engine import Engine


class Broker:
    """Opens connections to one store; `second` is a connection of another process, as far as the store can tell."""

    def __init__(self) -> None:
        self.url = f"streambroker-memory://{uuid.uuid4().hex}"
        self._opened: list[Connection] = []
        self._others = 0

    def open(self, **options: Any) -> Connection:
        connection = Connection(self.url, transport_options=options)
        self._opened.append(connection)
        connection.connect()
        return connection

    def second(self, **options: Any) -> Connection:
        """An engine is shared by equal URLs and options: a different client name makes another one."""
        self._others += 1
        return self.open(client_name=f"other-{self._others}", **options)

    def close(self) -> None:
        for connection in self._opened:
            connection.release()


def engine_of(connection: Connection) -> Engine:
    engine: Engine = connection.transport.shared.engine
    return engine


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.close()


def drain(connection: Connection, until: Any, timeout: float = 5.0) -> None:
    """Drain until `until()`; fails by socket.timeout."""
    while not until():
        connection.drain_events(timeout=timeout)
