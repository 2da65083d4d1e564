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
from typing import Any

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

    __slots__ = ("ahead", "began", "frames", "left", "numbers", "replies", "unsent")

    def __init__(self, frames: Sequence[Frame], numbers: Sequence[int], ahead: Sequence[Frame] = ()) -> None:
        self.frames = frames
        #: go before them, and nobody answers
        self.ahead = ahead
        self.numbers = numbers
        self.replies: list[Reply | None] = [None] * len(frames)
        self.left = len(frames)
        self.began = time.monotonic()
        #: there was no plain connection to send them on
        self.unsent = False


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
        self._lock: Any = threading.RLock()
        #: between two steps of ours: an exception that a signal's handler raises, a time limit, say, may come there
        self._midway = False
        self._wire: Wire | None = None
        #: of the link, when the plain connection was made
        self._epoch = 0
        self._queued: deque[tuple[Ticket, bytes]] = deque()
        #: what was sent and is not answered: number -> ticket, place in it
        self._sent: dict[int, tuple[Ticket, int]] = {}
        self._thread: int | None = None
        self._pause = _FIRST_PAUSE
        self._not_before = 0.0

    @property
    def connected(self) -> bool:
        """Whether there is a plain connection; it is made when it is needed."""
        return self._wire is not None

    def requests(self, frames: Sequence[Frame], timeout: float, ahead: Sequence[Frame] = ()) -> list[Reply | None]:
        """As `Link.requests`. `ahead`, some hundreds at most, is published before them over the same connection: who
        gets an answer knows that the server has read it."""
        end = time.monotonic() + timeout
        if len(frames) == 1 or ahead:
            return self.finish(self._queue(frames, ahead), timeout)
        replies: list[Reply | None] = []
        for window in windows(frames, self._link.max_payload):
            if replies and time.monotonic() >= end:
                return replies + [None] * (len(frames) - len(replies))
            replies += self.finish(self._queue(window), end - time.monotonic())
        return replies

    def begin(self, frames: Sequence[Frame], timeout: float) -> Ticket:
        """Send them, some hundreds at most. Raises as `requests`."""
        ticket = self._queue(frames)
        if not ticket.unsent:
            self._take_turn(None, time.monotonic() + timeout)
        if ticket.unsent:
            self._by_link(ticket, timeout)
        return ticket

    def finish(self, ticket: Ticket, timeout: float) -> list[Reply | None]:
        """Wait for the answers; None where none came in time or the connection broke."""
        end = time.monotonic() + timeout
        while ticket.left > 0 and not ticket.unsent and self._take_turn(ticket, end):
            pass
        if ticket.unsent:
            self._by_link(ticket, end - time.monotonic())
        elif ticket.left > 0:
            self._give_up(ticket)
        return ticket.replies

    def _queue(self, frames: Sequence[Frame], ahead: Sequence[Frame] = ()) -> Ticket:
        ticket = Ticket(frames, [next(self._numbers) for _ in frames], ahead)
        limit = self._link.max_payload
        # a signal's handler may publish in the midst of our own sending
        if not limit or not self._is_for_us() or self._lock._is_owned():
            ticket.unsent = True
            return ticket
        inbox = self._inbox
        commands = [*(encode(frame, limit) for frame in ahead),
                    *(encode(frame, limit, f"{inbox}.{number}")
                      for frame, number in zip(frames, ticket.numbers, strict=True))]
        self._queued.append((ticket, commands[0] if len(commands) == 1 else b"".join(commands)))
        return ticket

    def close(self) -> None:
        """What waits for answers gets none; what comes later goes over the link."""
        self._not_before = float("inf")
        with self._lock:
            self._break("closed")

    def after_fork(self) -> None:
        if self._pid != os.getpid():
            _graveyard.append((self._wire, self._lock))
            self._start()

    def _take_turn(self, ticket: Ticket | None, end: float) -> bool:
        """Send what all have queued, and, for a ticket, receive for all what comes within a moment. False when its time
        is over."""
        left = end - time.monotonic()
        if left <= 0 or self._lock._is_owned():
            return False
        # only this statement lets go of the lock wherever an exception comes
        with self._lock:
            if self._midway:
                # what came next would be taken for the rest of what was broken off
                self._break("a caller was interrupted")
            self._midway = True
            if self._queued:
                self._send(left)
            if ticket is not None and ticket.left > 0 and not ticket.unsent:
                self._receive()
            self._midway = False
        return True

    def _give_up(self, ticket: Ticket) -> None:
        with self._lock:
            ticket.left = 0
            for number in ticket.numbers:
                self._sent.pop(number, None)
            if self._wire is not None and self._wire.heard < ticket.began:
                self._break("not a word in time")
                self._link.doubt()

    # ------------------------------------------------------------------ with the lock

    def _send(self, timeout: float) -> None:
        """Everything that is queued."""
        wire = self._ready(timeout)
        parts = []
        while self._queued:
            ticket, data = self._queued[0]
            if not ticket.left:
                pass  # given up meanwhile
            elif wire is None:
                ticket.unsent = True
            else:
                parts.append(data)
                for index, number in enumerate(ticket.numbers):
                    self._sent[number] = ticket, index
            self._queued.popleft()
        if wire is not None and parts:
            try:
                wire.send(parts[0] if len(parts) == 1 else b"".join(parts), timeout)
            except OSError as error:
                self._break(error)

    def _receive(self, *, wait: bool = True) -> None:
        """What comes, or has come, soon."""
        if self._wire is None:
            return
        try:
            answers = self._wire.receive() if wait else self._wire.look()
        except OSError as error:
            self._break(error)
            return
        for number, reply in answers:
            if number:
                self._answer(number, reply)
                continue
            for sent, (ticket, index) in self._sent.copy().items():
                if ticket.frames[index].subject == reply.subject:
                    self._answer(sent, reply)

    def _answer(self, number: int, reply: Reply | None) -> None:
        entry = self._sent.pop(number, None)
        if entry is not None:
            ticket, index = entry
            ticket.replies[index] = reply
            ticket.left -= 1

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
                self._wire = dial(session, self._link.address, self._settings, self._inbox, timeout)
            except (OSError, ValueError) as error:
                logger.debug("no plain connection to %s, the link serves: %s", session.server, error)
                self._not_before = now + self._pause
                self._pause = min(self._pause * 2, _LONGEST_PAUSE)
            else:
                self._pause = _FIRST_PAUSE
        return self._wire

    # ------------------------------------------------------------------ without

    def _is_for_us(self) -> bool:
        if not is_green():
            return True
        thread: int = original("_thread", "get_ident")()
        if self._thread is None:
            self._thread = thread
        return self._thread == thread

    def _by_link(self, ticket: Ticket, timeout: float) -> None:
        link, epoch = self._link, self._link.epoch
        sent = not ticket.ahead or link.post(ticket.ahead)
        ticket.replies = link.requests(ticket.frames, timeout)
        if not sent or ticket.ahead and link.epoch != epoch:
            # what went before may be lost with another connection
            ticket.replies = [None] * len(ticket.frames)
        ticket.left, ticket.unsent = 0, False
