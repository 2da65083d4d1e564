"""Requests over a plain connection of this process, in groups: a thread that has something to send while another one is
sending or receiving leaves it to that one.

    replies = plain.requests(frames, timeout)

    ticket = plain.begin(frames, timeout)         # sent
    replies = plain.finish(ticket, timeout)       # answered
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from ... import fork
from ...real import is_green, original
from ...settings import Settings
from .frames import Frame, Reply, encode, windows
from .link import Link
from .wire import Wire, dial

logger = logging.getLogger(__name__)

#: seconds until a plain connection is tried again where none could be made
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
#: after so much silence a look tells whether the connection is still there
_IDLE = 1.0
#: what the parent of a fork left behind
_graveyard: list[object] = []


class Ticket:
    """Requests that are under way."""

    def __init__(self, frames: Sequence[Frame], numbers: Sequence[int]) -> None:
        self.frames = frames
        self.numbers = numbers
        self.replies: list[Reply | None] = [None] * len(frames)
        self.left = len(frames)
        self.began = time.monotonic()
        #: there is no plain connection to send them on
        self.unsent = False
        self._turn = threading.Lock()
        self._turn.acquire()

    def wake(self) -> None:
        """Whoever waits for it looks again."""
        try:
            self._turn.release()
        except RuntimeError:
            return  # is awake

    def wait(self, timeout: float) -> None:
        self._turn.acquire(timeout=timeout)


class Plain:
    """Thread-safe; in a green world for the greenlets of one OS thread. What cannot go over a plain connection goes
    over the link. A forked child makes its own."""

    def __init__(self, link: Link, settings: Settings) -> None:
        self._link = link
        self._settings = settings
        self._start()
        fork.register(self)

    def _start(self) -> None:
        self._pid = os.getpid()
        self._inbox = f"{self._link.address.inbox_prefix}.{secrets.token_hex(11)}"
        self._numbers = itertools.count(1)
        #: held by the one who sends and receives, for all
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        #: of the link, when the plain connection was made
        self._epoch = 0
        self._queued: deque[tuple[Ticket, bytes]] = deque()
        #: what was sent and is not answered: number -> ticket, place in it
        self._sent: dict[int, tuple[Ticket, int]] = {}
        self._waiting: dict[Ticket, None] = {}
        self._thread: int | None = None
        self._pause = _FIRST_PAUSE
        self._not_before = 0.0

    @property
    def connected(self) -> bool:
        """Whether there is a plain connection; it is made when it is needed."""
        return self._wire is not None

    def requests(self, frames: Sequence[Frame], timeout: float) -> list[Reply | None]:
        """As `Link.requests`."""
        if len(frames) == 1:
            return self.finish(self.begin(frames, timeout), timeout)
        end = time.monotonic() + timeout
        replies: list[Reply | None] = []
        for window in windows(frames, self._link.max_payload):
            ticket = self.begin(window, end - time.monotonic())
            replies += self.finish(ticket, end - time.monotonic())
        return replies

    def begin(self, frames: Sequence[Frame], timeout: float) -> Ticket:
        """Send them, some hundreds at most. Raises as `requests`."""
        ticket = Ticket(frames, [next(self._numbers) for _ in frames])
        limit = self._link.max_payload
        if not limit or not self._is_for_us():
            ticket.unsent = True
        else:
            inbox = self._inbox
            commands = [encode(frame, limit, f"{inbox}.{number}")
                        for frame, number in zip(frames, ticket.numbers, strict=True)]
            self._queued.append((ticket, b"".join(commands)))
            while self._queued and self._lock.acquire(blocking=False):
                try:
                    self._send(timeout)
                finally:
                    self._release()
        if ticket.unsent:
            self._by_link(ticket, timeout)
        return ticket

    def finish(self, ticket: Ticket, timeout: float) -> list[Reply | None]:
        """Wait for the answers; None where none came in time or the connection broke."""
        end = time.monotonic() + timeout
        self._waiting[ticket] = None
        try:
            while ticket.left > 0 and not ticket.unsent and (left := end - time.monotonic()) > 0:
                if not self._lock.acquire(blocking=False):
                    ticket.wait(left)
                    continue
                try:
                    self._serve(ticket, end)
                finally:
                    self._waiting.pop(ticket, None)
                    self._release()
        finally:
            self._waiting.pop(ticket, None)
            if ticket.left > 0:
                for number in ticket.numbers:
                    self._sent.pop(number, None)
        if ticket.unsent:
            self._by_link(ticket, end - time.monotonic())
        return ticket.replies

    def close(self) -> None:
        """What waits for answers gets none; what comes later goes over the link."""
        self._not_before = float("inf")
        if self._lock.acquire(timeout=1.0):
            try:
                self._break("closed")
            finally:
                self._release()

    def after_fork(self) -> None:
        if self._pid != os.getpid():
            _graveyard.append((self._wire, self._lock))
            self._start()

    # ------------------------------------------------------------------ with the lock

    def _serve(self, ticket: Ticket, end: float) -> None:
        """Send and receive for all until `ticket` is answered or its time is over."""
        while ticket.left > 0 and not ticket.unsent:
            left = end - time.monotonic()
            if left <= 0:
                if self._wire is not None and self._wire.heard < ticket.began:
                    # not a word since: it may hang
                    self._break("no answer in time")
                return
            if self._queued:
                self._send(left)
            self._receive()

    def _send(self, timeout: float) -> None:
        """Everything that is queued."""
        wire = self._ready(timeout)
        parts = []
        while self._queued:
            ticket, data = self._queued.popleft()
            if wire is None:
                ticket.unsent = True
                ticket.wake()
                continue
            parts.append(data)
            for index, number in enumerate(ticket.numbers):
                self._sent[number] = ticket, index
        if wire is not None and parts:
            try:
                wire.send(parts[0] if len(parts) == 1 else b"".join(parts), timeout)
            except OSError as error:
                self._break(error)
            except BaseException:
                # a time limit, say: the server would take what comes next for the rest of this
                self._break("a send was interrupted")
                raise

    def _receive(self, *, wait: bool = True) -> None:
        """What comes, or has come, soon."""
        if self._wire is None:
            return
        try:
            answers = self._wire.receive() if wait else self._wire.look()
        except OSError as error:
            self._break(error)
            return
        except BaseException:
            self._break("a read was interrupted")
            raise
        for number, reply in answers:
            if not number:
                numbers = [sent for sent, (ticket, index) in self._sent.copy().items()
                           if ticket.frames[index].subject == reply.subject]
            else:
                numbers = [number]
            for found in numbers:
                self._answer(found, reply)

    def _answer(self, number: int, reply: Reply | None) -> None:
        entry = self._sent.pop(number, None)
        if entry is not None:
            ticket, index = entry
            ticket.replies[index] = reply
            ticket.left -= 1
            if not ticket.left:
                ticket.wake()

    def _break(self, reason: object) -> None:
        """End the connection; nothing that was sent is answered any more."""
        wire, self._wire = self._wire, None
        if wire is not None:
            logger.debug("plain connection to %s: %s", self._link.address, reason)
            wire.close()
        for number in list(self._sent):
            self._answer(number, None)

    def _ready(self, timeout: float) -> Wire | None:
        """A connection that seems to work, on the server of the link; None when there is none to be had now."""
        now = time.monotonic()
        if self._wire is not None and not self._sent:
            if self._link.connected and self._link.epoch != self._epoch:
                self._break("the link is on another one")
            elif now - self._wire.heard > _IDLE:
                self._receive(wait=False)
        session = self._link.session
        if self._wire is None and session is not None and now >= self._not_before:
            self._epoch = self._link.epoch
            try:
                self._wire = dial(session, self._link.address, self._settings, self._inbox)
            except (OSError, ValueError) as error:
                logger.debug("no plain connection to %s, the link serves: %s", session.server, error)
                self._not_before = now + self._pause
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            else:
                self._pause = _FIRST_PAUSE
        return self._wire

    def _release(self) -> None:
        """Whoever waits for answers may lead now."""
        self._lock.release()
        for ticket in list(self._waiting) if self._waiting else ():
            if ticket.left > 0:
                ticket.wake()
                return

    # ------------------------------------------------------------------ without

    def _is_for_us(self) -> bool:
        if not is_green():
            return True
        thread: int = original("_thread", "get_ident")()
        if self._thread is None:
            self._thread = thread
        return self._thread == thread

    def _by_link(self, ticket: Ticket, timeout: float) -> None:
        ticket.replies = self._link.requests(ticket.frames, timeout)
        ticket.left, ticket.unsent = 0, False
