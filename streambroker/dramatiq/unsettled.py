"""What a process has of one queue and has not settled, whichever consumer brought it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .consumer import StreamMessage


class Unsettled:
    """Thread-safe. Outlives the consumers of its queue: Dramatiq replaces them while their messages run."""

    def __init__(self) -> None:
        self._messages: dict[int, StreamMessage] = {}
        self._freed = threading.Event()
        #: a waiter wants no more than so many left; -1 when nobody waits
        self._enough = -1

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: object) -> bool:
        return id(message) in self._messages

    def add(self, message: StreamMessage) -> None:
        self._messages[id(message)] = message

    def remove(self, message: object) -> bool:
        """False when it is not there: it was settled before, or comes from the parent of a fork."""
        if self._messages.pop(id(message), None) is None:
            return False
        if len(self._messages) <= self._enough:
            self._freed.set()
        return True

    def messages(self) -> list[StreamMessage]:
        return list(self._messages.values())

    def wait(self, enough: int, timeout: float) -> bool:
        """Until at most `enough` are left, `timeout` seconds at most. For one thread at a time."""
        self._freed.clear()
        self._enough = enough
        try:
            return len(self._messages) <= enough or self._freed.wait(timeout)
        finally:
            self._enough = -1
