"""Shared tables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError
from .link import Frame
from .rows import Row, Rows, View, removal, row_data
from .stored import run

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: how long an impatient look tries (seconds)
IMPATIENCE = 1.0


class JetStreamTable:
    """See `streambroker.engine.SharedTable`. Thread-safe; blocks, so not for the link's thread. What `rows` returns is
    the same object as long as nothing changed."""

    def __init__(self, engine: JetStreamEngine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._rows = Rows(engine, engine.names.rows(name))
        self._plain: tuple[View, Mapping[str, str]] = (self._rows.view, {})
        #: of the last change of our own
        self._changed = float("-inf")

    def rows(self, max_age: float = 0.0, *, patient: bool = True) -> Mapping[str, str]:
        """See `SharedTable`."""
        view = self._rows.view
        if view.seen <= self._changed or time.monotonic() - view.seen >= max_age:
            view = run(self._engine, self._rows.look, None if patient else IMPATIENCE)
        known, plain = self._plain
        if view.rows is not known.rows:
            fresh = {row.key: row.value for row in view.rows.values() if row.key is not None}
            if fresh != plain:
                plain = fresh
            self._plain = view, plain
        return plain

    async def look(self) -> View:
        """The rows as they are now; in the link's thread."""
        return await self._rows.look()

    def put(self, key: str, value: str, queue: str = "") -> bool:
        """See `SharedTable`. A row with a queue is written even when it is unchanged: its removal may be under way."""
        before = self._find(key)
        changed = before is None or before.value != value
        if changed or queue or before is not None and before.queue:
            subject = self._engine.names.row(self._name, key)
            self._write([Frame(subject, row_data(key, value, queue))])
        return changed

    def delete(self, keys: Collection[str]) -> int:
        if not keys:
            return 0
        self.rows()
        there = [self._engine.names.row(self._name, key) for key in set(keys) if self._known(key) is not None]
        if there:
            self._write([removal(self._engine, subject) for subject in there])
        return len(there)

    def _find(self, key: str) -> Row | None:
        self.rows()
        return self._known(key)

    def _known(self, key: str) -> Row | None:
        row = self._rows.view.rows.get(self._engine.names.row(self._name, key))
        return None if row is None or row.key is None else row

    def _write(self, frames: list[Frame]) -> None:
        try:
            run(self._engine, partial(store_all, self._engine, frames))
        finally:
            self._changed = time.monotonic()


async def store_all(engine: JetStreamEngine, frames: list[Frame]) -> None:
    """Store rows, which may be repeated without harm. Raises StoreError, StoreConnectionError."""
    end = time.monotonic() + engine.settings.publish_timeout
    await engine.streams.aensure(engine.names.state)
    left = frames
    while left:
        results = await asyncio.gather(*(engine.streams.store(frame, engine.names.state) for frame in left),
                                       return_exceptions=True)
        again, problem = [], None
        for frame, result in zip(left, results, strict=True):
            if isinstance(result, StoreConnectionError):
                again.append(frame)
                problem = result
            elif isinstance(result, BaseException):
                raise result
        left = again
        if problem is not None:
            if time.monotonic() + 0.2 >= end:
                raise problem
            await asyncio.sleep(0.2)
