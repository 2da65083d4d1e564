"""Kombu connections on a store of their own: for `tests` in memory, for `integration` on real servers."""

from __future__ import annotations

import uuid
from typing import Any

from kombu import Connection

from streambroker.engine import Engine


class Broker:
    """Opens connections to one store; `second` is a connection of another process, as far as the store can tell."""

    def __init__(self, url: str = "", **options: Any) -> None:
        self.url = url or f"streambroker-memory://{uuid.uuid4().hex}"
        self.options = options
        self._opened: list[Connection] = []
        self._others = 0

    def open(self, **options: Any) -> Connection:
        connection = Connection(self.url, transport_options={**self.options, **options})
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


def drain(connection: Connection, until: Any, timeout: float = 5.0) -> None:
    """Drain until `until()`; fails by socket.timeout."""
    while not until():
        connection.drain_events(timeout=timeout)
