"""Settlements that are waited for: threads that settle at the same time share a request, on a connection of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...together import Together
from .commands import Commands
from .settles import Settle

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine


class Awaited:
    """Of one engine and process. Thread-safe. Connects at first use."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._commands = engine.make_commands(engine.settings.publish_timeout)
        self._together = Together(self._settle)

    def settle(self, settle: Settle) -> None:
        """Returns when the store has confirmed. Raises StoreConnectionError, StoreError, Closed."""
        self._together.do(settle)

    def _settle(self, settles: list[Settle]) -> None:
        packed = self._engine.packer.pack(settles)
        replies = self._commands.many([data for data, _ in packed])
        for (_, part), reply in zip(packed, replies, strict=True):
            self._engine.settled(part, Commands.check(reply))

    def close(self) -> None:
        self._commands.close()

    def after_fork(self) -> None:
        self._commands.after_fork()
