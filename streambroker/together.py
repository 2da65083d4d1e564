"""Threads that wait for the same kind of work share it: one does it for all who wait by then."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Wish(Generic[T]):
    __slots__ = ("done", "error", "what")

    def __init__(self, what: T) -> None:
        self.what = what
        self.done = False
        self.error: Exception | None = None


class Together(Generic[T]):
    """Calls `work` with what has come together; what it raises is raised in each thread whose part it was. Thread-safe,
    greenlet-safe; in a forked child make another one."""

    def __init__(self, work: Callable[[list[T]], None]) -> None:
        self._work = work
        self._wishes: deque[_Wish[T]] = deque()
        self._lock = threading.Lock()

    def do(self, what: T) -> None:
        """Returns when `work` has done it."""
        wish = _Wish(what)
        self._wishes.append(wish)
        with self._lock:
            if not wish.done and wish.error is None:
                self._lead(wish)
        if wish.error is not None:
            raise wish.error

    def _lead(self, own: _Wish[T]) -> None:
        # a leader that was interrupted may have taken it out before
        batch = [own]
        while self._wishes:
            wish = self._wishes.popleft()
            if wish is not own:
                batch.append(wish)
        try:
            self._work([wish.what for wish in batch])
        except Exception as error:  # noqa: BLE001  each who waits gets it
            for wish in batch:
                wish.error = error
        else:
            for wish in batch:
                wish.done = True
