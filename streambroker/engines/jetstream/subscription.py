"""Live copies of broadcasts, by plain subjects: nothing is stored."""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...errors import Closed, MessageTooLarge, StoreConnectionError
from ...message import Message
from ...readable import wait_readable
from ...real import Wakeup
from ...topics import matches
from .envelope import Envelope, decode
from .link import Frame, Listener, Reply
from .outage import Outage

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long a broadcast tries to reach the store (seconds)
IMPATIENCE = 1.0
#: before the envelope: length of the key
_KEY = struct.Struct(">I")


class JetStreamSubscription:
    """See `streambroker.engine.Subscription`. What is broadcast while the link is being mended is lost."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._wanted: dict[str, list[str]] = {}
        self._listeners: dict[str, Listener] = {}
        self._inbox: deque[tuple[str, str, Message]] = deque()
        self._wakeup = Wakeup()
        self._outage = Outage(engine.link, engine.settings)
        self._closed = False

    def add(self, topic: str, pattern: str = "") -> None:
        self._check()
        patterns = self._wanted.setdefault(topic, [])
        if pattern not in patterns:
            patterns.append(pattern)
        if topic not in self._listeners:
            subject = self._engine.names.topic_all(topic)
            self._listeners[topic] = self._engine.link.listen(subject, partial(self._arrived, topic))

    def discard(self, topic: str, pattern: str = "") -> None:
        patterns = self._wanted.get(topic, [])
        if pattern in patterns:
            patterns.remove(pattern)
        if not patterns and topic in self._listeners:
            self._wanted.pop(topic)
            self._listeners.pop(topic).close()

    def _arrived(self, topic: str, reply: Reply) -> None:
        """In the link's thread."""
        try:
            size, = _KEY.unpack_from(reply.data)
            start = _KEY.size + size
            key = reply.data[_KEY.size:start].decode("utf-8", "surrogateescape")
            if not any(matches(pattern, key) for pattern in list(self._wanted.get(topic, ()))):
                return
            message = decode(reply.data[start:]).message
        except (struct.error, ValueError):
            self._engine.chores.report(f"a broadcast on {reply.subject} is none of ours and is ignored")
            return
        self._inbox.append((topic, key, message))
        self._wakeup.set()

    def receive(self, timeout: float) -> list[tuple[str, str, Message]]:
        deadline = time.monotonic() + timeout
        while True:
            self._check()
            self._wakeup.clear()
            if self._listeners:
                self._outage.look()
            arrived: list[tuple[str, str, Message]] = []
            while self._inbox:
                arrived.append(self._inbox.popleft())
            left = deadline - time.monotonic()
            if arrived or timeout <= 0 or left <= 0:
                return arrived
            due = self.due()
            wait_readable([self._wakeup.fileno()], left if due is None else min(left, due))

    def wake(self) -> None:
        """From any thread: the link broke or is back."""
        self._wakeup.set()

    def sources(self) -> Sequence[int]:
        return [] if self._closed else [self._wakeup.fileno()]

    def due(self) -> float | None:
        return self._outage.due() if self._listeners else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._engine.forked():
            for listener in self._listeners.values():
                listener.close()
        self._wakeup.close()

    def _check(self) -> None:
        if self._closed or self._engine.closed:
            raise Closed("the subscription is closed, or belongs to the parent process of a fork")

    def after_fork(self) -> None:
        self._closed = True
        self._wakeup.close()


def broadcast(engine: JetStreamEngine, topic: str, message: Message, key: str = "") -> None:
    """To whoever listens. Returns when the server has it, raises StoreConnectionError when that does not happen soon,
    MessageTooLarge when the server would not take it."""
    name = key.encode("utf-8", "surrogateescape")
    data = b"".join((_KEY.pack(len(name)), name, Envelope(message).encode()))
    link = engine.link
    if not link.connected:
        link.open(IMPATIENCE)
    if len(data) > link.max_payload:
        raise MessageTooLarge(f"a broadcast of {len(data)} bytes is over the server's max_payload ({link.max_payload});"
                              " raise it in the server's configuration or send a reference")
    if not link.post([Frame(engine.names.topic(topic, key), data)]):
        raise StoreConnectionError("the link broke; nothing was broadcast")
    link.flush(IMPATIENCE)
