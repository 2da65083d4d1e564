"""One real OS thread for what must go on while tasks compute, loops are blocked and pools join: renewing leases,
promoting due messages, taking over from the dead, and sending what nobody else sends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from .readable import wait_readable
from .real import Wakeup, start_thread

logger = logging.getLogger(__name__)

NEVER = float("inf")


class Keeper:
    """Calls `turn` again and again in its own thread; `turn` returns the seconds until its next call. Between calls it
    waits for that time, for a `wake`, or for one of `sources()` to be readable. Exceptions of `turn` are logged and the
    thread goes on. Start it once; `stop` ends it for good; in a forked child it does not run."""

    def __init__(self, turn: Callable[[], float], sources: Callable[[], Sequence[int]] = tuple) -> None:
        self._turn = turn
        self._sources = sources
        self._wakeup = Wakeup()
        self._running = False
        self._ended = False
        #: monotonic time of the next turn, and a wish for an earlier one that came during a turn
        self._next_turn = 0.0
        self._wish = NEVER

    @property
    def running(self) -> bool:
        return self._running

    def start(self) -> None:
        if not self._running:
            self._running, self._ended = True, False
            start_thread(self._run)

    def wake_within(self, seconds: float) -> None:
        """Have a turn within that time. From any thread; cheap when one is due by then anyway."""
        when = time.monotonic() + seconds
        if when < self._wish:
            self._wish = when
        if when < self._next_turn:
            self._next_turn = when
            self._wakeup.set()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread and wait for its end, at most `timeout` seconds."""
        if not self._running:
            return
        self._running = False
        self._wakeup.set()
        deadline = time.monotonic() + timeout
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.002)
        if self._ended:
            self._wakeup.close()

    def _run(self) -> None:
        try:
            while self._running:
                self._wish = NEVER
                try:
                    pause = self._turn()
                except Exception:
                    logger.exception("the keeper's turn failed; it goes on")
                    pause = 1.0
                self._next_turn = time.monotonic() + pause
                self._next_turn = min(self._next_turn, self._wish)
                self._wait()
        finally:
            self._ended = True

    def _wait(self) -> None:
        """Until the next turn. A wake only moves its time, so many of them cost one turn."""
        while self._running and (left := self._next_turn - time.monotonic()) > 0:
            others = [fd for fd in self._sources() if fd >= 0]
            readable = wait_readable([self._wakeup.fileno(), *others], left, real=True)
            self._wakeup.clear()
            if readable & {*others}:
                return

    def after_fork(self) -> None:
        self._wakeup.close()
        self._wakeup = Wakeup()
        self._running = False
