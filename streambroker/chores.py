"""What the keeper's thread leaves to the threads of the application, and the log lines of both."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from .real import is_green

logger = logging.getLogger(__package__)

#: a trouble is told once in this time (seconds)
REPEAT = 30.0


class Chores:
    """Anyone adds, whoever drives a consumer does them. Thread-safe."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._waiting: deque[Callable[[], None]] = deque()
        self._told: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, chore: Callable[[], None]) -> None:
        self._waiting.append(chore)

    def do(self) -> None:
        while self._waiting:
            try:
                chore = self._waiting.popleft()
            except IndexError:
                return
            chore()

    def report(self, text: str, calm: bool = False) -> None:
        """One log line for a trouble, repeated at most twice a minute."""
        now = time.monotonic()
        kind = text.partition(":")[0]
        if now - self._told.get(kind, -REPEAT) >= REPEAT:
            self._told[kind] = now
            self.say(logging.INFO if calm else logging.WARNING, "%s: %s", self._where, text)

    def say(self, level: int, text: str, *values: object) -> None:
        """Log. Under gevent and eventlet the keeper must not: a handler's lock cannot be shared between OS threads."""
        if is_green():
            self.add(partial(logger.log, level, text, *values))
        else:
            logger.log(level, text, *values)
