"""Waiting in one thread or greenlet for what another OS thread does."""

from __future__ import annotations

import _thread
import os
import select
import threading
from collections import deque
from typing import Protocol

from ...real import Wakeup, is_gevent, is_green, make_lock


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
    """For eventlet, and for other OS threads than gevent's: the patched select lets other greenlets run meanwhile."""

    def __init__(self) -> None:
        self._wakeup = Wakeup()

    def set(self) -> None:
        self._wakeup.set()

    def wait(self, timeout: float) -> bool:
        return bool(select.select([self._wakeup.fileno()], [], [], max(timeout, 0.0))[0])

    def done(self) -> None:
        self._wakeup.close()


class _Pump:
    """Sets the events of gevent's greenlets in their own OS thread, the main one: a thousand that wait share one pipe.
    (eventlet's children would take what watches the pipe away from their parent: they share its epoll.)"""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._wakeup = Wakeup()
        self._rung: deque[threading.Event] = deque()

    def start(self) -> None:
        # patched: a greenlet
        _thread.start_new_thread(self._run, ())

    def ring(self, event: threading.Event) -> None:
        self._rung.append(event)
        self._wakeup.set()

    def _run(self) -> None:
        while True:
            select.select([self._wakeup.fileno()], [], [])
            if self.pid != os.getpid():
                return  # a copy in a forked child, which must not empty its parent's pipe
            self._wakeup.clear()
            while self._rung:
                self._rung.popleft().set()


class _GreenWaiter:
    def __init__(self, pump: _Pump) -> None:
        self._pump = pump
        # patched: for greenlets of this OS thread alone
        self._event = threading.Event()

    def set(self) -> None:
        self._pump.ring(self._event)

    def wait(self, timeout: float) -> bool:
        return self._event.wait(min(max(timeout, 0.0), threading.TIMEOUT_MAX))

    def done(self) -> None:
        pass


_pump: _Pump | None = None


def make_waiter() -> Waiter:
    global _pump
    if not is_green():
        return _LockWaiter()
    if not is_gevent() or threading.get_native_id() != threading.main_thread().native_id:
        return _PipeWaiter()
    pump = _pump
    if pump is None or pump.pid != os.getpid():
        pump = _pump = _Pump()
        pump.start()
    return _GreenWaiter(pump)
