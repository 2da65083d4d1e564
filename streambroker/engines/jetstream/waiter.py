"""Waiting in one thread or greenlet for what another OS thread does."""

from __future__ import annotations

import select
import threading
from typing import Protocol

from ...real import Wakeup, is_green, make_lock


class Waiter(Protocol):
    """One waits, once; any thread sets."""

    def set(self) -> None: ...

    def wait(self, timeout: float) -> bool:
        """Whether it was set within that time."""

    def done(self) -> None:
        """The one who waits does so no more."""


class _LockWaiter:
    def __init__(self) -> None:
        self._lock = make_lock()
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))

    def done(self) -> None:
        pass


class _PipeWaiter:
    """For greenlets: the patched select lets the others run meanwhile."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()

    def set(self) -> None:
        self._wakeup.set()

    def wait(self, timeout: float) -> bool:
        return bool(select.select([self._wakeup.fileno()], [], [], max(timeout, 0.0))[0])

    def done(self) -> None:
        self._wakeup.close()


def make_waiter() -> Waiter:
    return _PipeWaiter() if is_green() else _LockWaiter()
