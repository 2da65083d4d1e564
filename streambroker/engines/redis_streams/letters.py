"""Who wants to know of dead letters: a forwarder that stores them elsewhere, a watcher of convictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...message import DeadLetter

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine


class Letters:
    """Told from any thread; what follows is done by whoever drives a consumer."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._forwards: dict[str, Callable[[DeadLetter], bool]] = {}
        self._tellers: dict[str, Callable[[DeadLetter], None]] = {}

    def forward(self, queue: str, forward: Callable[[DeadLetter], bool]) -> None:
        self._forwards[queue] = forward
        self.buried(queue)

    def watch(self, queue: str, tell: Callable[[DeadLetter], None]) -> None:
        self._tellers[queue] = tell

    def buried(self, queue: str) -> None:
        """A message of `queue` became a dead letter."""
        if queue in self._forwards:
            self._engine.chores.add(partial(self._forward, queue))

    def convicted(self, queue: str, ids: Sequence[bytes]) -> None:
        """Those messages of `queue` became dead letters for what they did to their workers."""
        self.buried(queue)
        if queue in self._tellers:
            self._engine.chores.add(partial(self._tell, queue, ids))

    def _forward(self, queue: str) -> None:
        inspector = self._engine.inspector()
        for letter in inspector.dead(queue):
            if self._forwards[queue](letter):
                inspector.dead_remove(queue, [letter.id])

    def _tell(self, queue: str, ids: Sequence[bytes]) -> None:
        for letter in self._engine.inspector().dead_ones(queue, ids):
            self._tellers[queue](letter)
