"""What drives a connection: Kombu's event loop, or whoever drains it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..readable import wait_readable
from ..real import Wakeup

if TYPE_CHECKING:
    from .feeds import Feed
    from .transport import Transport

#: how often the registration of file descriptors is renewed: a replaced link may have got the number of the old one
RENEW = 0.5


class DrainWakeup:
    """Wakes a drain that waits, from any thread or greenlet: a settled message has freed credit."""

    def __init__(self) -> None:
        self._pipe: Wakeup | None = None
        self._waited_for = False

    def set_if_waited_for(self) -> None:
        if self._waited_for and self._pipe is not None:
            self._waited_for = False
            self._pipe.set()

    def wait(self, feeds: Iterable[Feed], timeout: float | None) -> None:
        """Until a feed may have something, or the time is over. A link that another thread closes in this moment ends
        the wait too."""
        if self._pipe is None:
            self._pipe = Wakeup()
        self._waited_for = True
        try:
            dues = [due for feed in feeds if (due := feed.due()) is not None]
            if timeout is not None:
                dues.append(timeout)
            wait_readable({self._pipe.fileno(), *(fd for feed in feeds for fd in feed.sources())},
                          min(dues) if dues else None)
        finally:
            self._waited_for = False
            if self._pipe is not None:
                self._pipe.clear()

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class HubDriver:
    """Pumps a connection from Kombu's event loop.

    In a turn the loop runs callbacks (acknowledgements among them), then timers, then `tick`, then it polls and calls
    readers. What has arrived is best handed over by readers: callbacks, timers and jobs for the pool that come up in
    `tick` would wait for the end of a poll that does not know of them, so then a byte in our own pipe ends it.
    """

    def __init__(self, transport: Transport, hub: Any) -> None:
        self._transport = transport
        self._hub = hub
        self._pipe = Wakeup()
        self._watched: list[tuple[int, Feed]] = []
        self._renew_at = 0.0
        self._timer: Any = None
        self._timer_at = 0.0
        self._closed = False
        hub.add_reader(self._pipe.fileno(), self._pipe.clear)
        hub.on_tick.add(self.tick)

    def tick(self) -> None:
        if self._transport.pid != os.getpid():
            return
        handed = self._transport.pump(quiet=False)
        if self._closed:
            return
        due = self._watch()
        if handed or due == 0:
            self._pipe.set()
        elif due is not None:
            self._pump_in(due)

    def _pump_in(self, due: float) -> None:
        now = time.monotonic()
        # a timer whose time is over may have been cancelled: Celery does that to timers of a lost connection
        if self._timer is None or self._timer_at <= now or now + due < self._timer_at - 0.001:
            self._cancel_timer()
            self._timer_at = now + due
            self._timer = self._hub.call_later(due, self._timer_fired)
            self._pipe.set()

    def _watch(self) -> float | None:
        """Register the sources of all feeds; the seconds until one of them is due."""
        watched: list[tuple[int, Feed]] = []
        dues: list[float] = []
        for feed in self._transport.feeds:
            watched.extend((fd, feed) for fd in feed.sources())
            due = feed.due()
            if due is not None:
                dues.append(due)
        now = time.monotonic()
        if watched != self._watched or now >= self._renew_at:
            self._renew_at = now + RENEW
            self._hub.add_reader(self._pipe.fileno(), self._pipe.clear)
            for fd in {fd for fd, _ in self._watched} - {fd for fd, _ in watched}:
                self._hub.remove_reader(fd)
            for fd, feed in watched:
                self._hub.add_reader(fd, self._transport.pump_one, feed)
            self._watched = watched
        return min(dues) if dues else None

    def _timer_fired(self) -> None:
        self._timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Leave nothing of this connection in the loop."""
        self._closed = True
        self._hub.on_tick.discard(self.tick)
        self._cancel_timer()
        for fd in {self._pipe.fileno(), *(fd for fd, _ in self._watched)}:
            self._hub.remove_reader(fd)
        self._watched = []
        self._pipe.close()
