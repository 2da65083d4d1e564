"""Real OS threads and locks, also where gevent or eventlet has replaced `threading`.

A patched thread is a greenlet: it stops while a task computes, and with it the renewal of leases.
"""

from __future__ import annotations

import _thread
import os
import posix
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def is_gevent() -> bool:
    """Whether threads are gevent's greenlets here."""
    gevent = sys.modules.get("gevent.monkey")
    return bool(gevent is not None and gevent.is_module_patched("threading"))


def is_green() -> bool:
    """Whether threads are greenlets here."""
    eventlet = sys.modules.get("eventlet.patcher")
    return bool(is_gevent() or eventlet is not None and eventlet.is_monkey_patched("thread"))


def original(module: str, name: str) -> Any:
    """`module.name` as it was before any patching."""
    if not is_green():
        return getattr(import_module(module), name)
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return gevent.get_original(module, name)
    return getattr(sys.modules["eventlet.patcher"].original(module), name)


def start_thread(target: Callable[[], None]) -> int:
    """Run `target` in a new OS thread that does not keep the process alive; its identifier."""
    start: Callable[[Callable[[], None], tuple[()]], int] = original("_thread", "start_new_thread")
    return start(target, ())


def make_lock() -> _thread.LockType:
    """A lock between OS threads. Under gevent or eventlet hold it for moments only: it stops the whole loop."""
    lock: _thread.LockType = original("_thread", "allocate_lock")()
    return lock


def make_reentrant_lock() -> Any:
    """The same, which its OS thread may take again."""
    return original("_thread", "RLock")()


class Wakeup:
    """A pipe that wakes a select from any thread or greenlet. `set` never blocks: reads and writes are those of
    `posix`, since eventlet makes the ones of `os` wait. Who waits looks for what he waits for after `clear`, who sets
    has it there before: then a byte that is in the pipe already serves for many."""

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    @property
    def is_set(self) -> bool:
        """Something may wait. A reader that believes this alone must `clear` now and then all the same: a setter may be
        between its two steps."""
        return self._is_set

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        if self._is_set:
            return
        self._is_set = True
        try:
            posix.write(self._writer, b"\0")
        except BlockingIOError:
            pass
        except OSError:
            return  # closed meanwhile: nobody waits any more

    def clear(self) -> None:
        # always: a setter may be between its two steps
        try:
            while posix.read(self._reader, 4096) == b"\0" * 4096:
                pass
        except (BlockingIOError, OSError):
            pass
        self._is_set = False

    def close(self) -> None:
        for fd in (self._reader, self._writer):
            if fd >= 0:
                os.close(fd)
        self._reader = self._writer = -1
