"""What happens in a forked child, in one place: whoever is registered forgets what belongs to the parent.

Runs inside `os.fork`, before anything else in the child, so a lock that another thread of the parent held at that
moment is replaced before someone can wait for it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    def after_fork(self) -> None:
        """Drop sockets, threads, locks and everything in flight without a word to anyone."""


_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(thing: ForkAware) -> None:
    _aware.add(thing)


def _in_child() -> None:
    for thing in list(_aware):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
