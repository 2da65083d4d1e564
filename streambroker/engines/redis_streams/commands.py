"""One connection for requests that wait for their answer, shared by the threads of a process under a lock.

A broken link is mended and what was not confirmed is sent again, in order: every request here may be repeated, since it
reads, is idempotent by nature, or carries a producer's sequence.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import AuthenticationError, Closed, StoreConnectionError
from .link import DEMOTED, UNAVAILABLE, translate
from .resp import ReplyError, Word, pack
from .scripts import script

logger = logging.getLogger(__name__)

#: pauses between tries, the last one again and again
PAUSES = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
#: for a call that is not worth much waiting (one with a patience of its own): its wait for an answer, and how old an
#: error may be that is told again instead of another try
HASTE, RECENT = 2.0, 2.0


class Channel(Protocol):
    """What a `Link` to one server and a `Router` to a cluster have in common."""

    @property
    def is_open(self) -> bool: ...
    def open(self, timeout: float | None = None) -> None: ...
    def send(self, data: bytes) -> None: ...
    def read(self, timeout: float | None = None) -> Any: ...
    def close(self) -> None: ...
    def interrupt(self) -> None: ...
    def abandon(self) -> None: ...


class Request:
    """A packed command that waits for its answer."""

    __slots__ = ("answered", "data", "reply", "wanted")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reply: Any = None
        self.answered = False
        #: nobody waits for the answer: an error is raised by whoever settles next
        self.wanted = False


class Commands:
    """Thread-safe, greenlet-safe. `patience` is how long a request tries to get over a broken or unwilling store."""

    def __init__(self, make_link: Callable[[], Channel], patience: float) -> None:
        self._make_link = make_link
        self._patience = patience
        self._link = make_link()
        self._lock = threading.Lock()
        self._open: deque[Request] = deque()
        self._closed = False
        #: when a patience ended in vain last
        self._gave_up = float("-inf")

    def call(self, *words: Word, patience: float | None = None) -> Any:
        """One command. Raises StoreError, StoreConnectionError, Closed."""
        return self.run(pack(*words), patience)

    def script(self, name: str, keys: list[str], *args: Word, patience: float | None = None) -> Any:
        return self.run(script(name).call(keys, *args), patience)

    def run(self, data: bytes, patience: float | None = None) -> Any:
        request, since = Request(data), time.monotonic()
        with self._lock:
            self.send(request)
            self.settle(0, patience, since)
        return self.answer(request)

    def many(self, packed: list[bytes], patience: float | None = None) -> list[Any]:
        """Several commands in one write; error replies are returned as ReplyError."""
        requests, since = [Request(data) for data in packed], time.monotonic()
        with self._lock:
            self.send(*requests)
            self.settle(0, patience, since)
        return [request.reply for request in requests]

    @property
    def lock(self) -> threading.Lock:
        """For callers that use `send` and `settle` themselves."""
        return self._lock

    def send(self, *requests: Request) -> None:
        """Send in one write without waiting. Needs the lock. A broken link shows in `settle`."""
        if self._closed:
            raise Closed("the engine is closed")
        self._open.extend(requests)
        if self._link.is_open:
            try:
                self._link.send(b"".join([request.data for request in requests]))
            except StoreConnectionError:
                logger.debug("link broke while sending; it is sent again")

    def settle(self, left_open: int = 0, patience: float | None = None, since: float | None = None) -> None:
        """Read replies until at most `left_open` requests are unanswered. Needs the lock. When the patience is over
        the unanswered ones are given up and the error is raised. `since` is when the caller began to wait for the lock:
        what another one tried in vain meanwhile was a part of its patience. A caller with a patience of its own waits
        no longer for an answer either, and not at all when someone has just given up."""
        hasty = patience is not None
        limit = max(HASTE, patience) if patience is not None else None
        patience = self._patience if patience is None else patience
        in_vain = since is not None and self._gave_up > (since - RECENT if hasty else since)
        deadline = since + (0.0 if hasty else patience) if since is not None and in_vain else None
        if deadline is not None and not self._link.is_open and time.monotonic() >= deadline:
            self._open.clear()
            raise StoreConnectionError("the store cannot be reached")
        tries = 0
        while len(self._open) > left_open:
            try:
                if not self._link.is_open:
                    self._reopen(limit)
                reply = self._link.read(limit)
                request = self._open[0]
                if isinstance(reply, ReplyError) and self._again(reply, request):
                    continue
                if isinstance(reply, ReplyError) and _word(reply) in UNAVAILABLE:
                    if _word(reply) in DEMOTED:
                        self._link.close()
                    raise translate(reply)
                self._open.popleft()
                request.reply, request.answered = reply, True
                if request.wanted:
                    self.answer(request)
            except StoreConnectionError as error:
                self._link.close()
                now = time.monotonic()
                if deadline is None:
                    deadline = now + patience
                pause = PAUSES[min(tries, len(PAUSES) - 1)]
                if self._closed or isinstance(error, (AuthenticationError, Closed)) or now + pause >= deadline:
                    self._open.clear()
                    self._gave_up = now
                    raise
                tries += 1
                time.sleep(pause)

    @staticmethod
    def check(reply: Any) -> Any:
        """The reply; raises what it says when it is an error."""
        if isinstance(reply, ReplyError):
            raise translate(reply) from reply
        return reply

    def answer(self, request: Request) -> Any:
        return self.check(request.reply)

    def _reopen(self, timeout: float | None) -> None:
        self._link.open(timeout)
        self._link.send(b"".join(request.data for request in self._open))

    def _again(self, reply: ReplyError, request: Request) -> bool:
        """Where the server lost its scripts nothing has run: load the one that is missing and send all again."""
        if _word(reply) != "NOSCRIPT":
            return False
        self._link.close()
        self._link.open()
        for name in SCRIPTS:
            self._link.send(script(name).load)
        for _ in SCRIPTS:
            loaded = self._link.read()
            if isinstance(loaded, ReplyError):
                raise translate(loaded) from loaded
        self._link.send(b"".join(waiting.data for waiting in self._open))
        return True

    def close(self) -> None:
        """Waits for nothing: call `settle` first. A call that is under way in another thread fails soon."""
        self._closed = True
        self._link.interrupt()
        if self._lock.acquire(timeout=0.2):
            self._link.close()
            self._lock.release()

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._open = deque()
        self._link.abandon()
        self._link = self._make_link()


def _word(reply: ReplyError) -> str:
    return str(reply).split(" ", 1)[0]


SCRIPTS = (
    "publish", "delay", "promote", "take", "done", "settle", "reclaim", "adopt", "held", "register", "unregister",
    "look", "forget", "drop", "dead_remove", "table_read", "table_write", "table_drop", "declare", "size", "purge",
    "remove", "replay", "ring", "dead_expire")
