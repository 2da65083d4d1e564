"""Live copies of broadcasts, by publish/subscribe on one connection."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Closed, StoreConnectionError
from ...message import Message
from ...readable import wait_readable
from ...topics import matches
from .publisher import decode
from .resp import ReplyError, pack

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)

#: a silent link is asked for a sign of life this often, and counts as dead when none comes in time
PING_EVERY, PING_PATIENCE = 20.0, 5.0


class RedisSubscription:
    """See `streambroker.engine.Subscription`. What is broadcast while the link is being mended is lost."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._link = engine.make_link()
        self._wanted: dict[tuple[str, str], str] = {}
        self._confirmed: set[str] = set()
        self._inbox: deque[tuple[str, str, Message]] = deque()
        self._heard = 0.0
        self._asked = False
        self._down_since: float | None = None
        self._retry_at = 0.0
        self._closed = False

    def add(self, topic: str, pattern: str = "") -> None:
        self._check()
        channel = self._engine.keys.topic_pattern(topic, pattern)
        self._wanted[topic, pattern] = channel
        if not self._link.is_open:
            self._open()
        elif channel not in self._confirmed:
            self._link.send(pack("PSUBSCRIBE", channel))
        deadline = time.monotonic() + self._engine.settings.socket_timeout
        while channel not in self._confirmed:
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreConnectionError("no answer to a subscription in time")
            self._handle(self._link.read(left))

    def discard(self, topic: str, pattern: str = "") -> None:
        channel = self._wanted.pop((topic, pattern), None)
        if channel and channel not in self._wanted.values() and self._link.is_open and not self._closed:
            self._confirmed.discard(channel)
            try:
                self._link.send(pack("PUNSUBSCRIBE", channel))
            except StoreConnectionError as error:
                logger.debug("link broke: %s", error)

    def receive(self, timeout: float) -> list[tuple[str, str, Message]]:
        self._check()
        deadline = time.monotonic() + timeout
        while True:
            self._turn()
            if self._inbox or timeout <= 0 or time.monotonic() >= deadline:
                arrived = list(self._inbox)
                self._inbox.clear()
                return arrived
            due = self.due()
            left = max(0.0, deadline - time.monotonic())
            if self._link.is_open:
                wait_readable([self._link.fileno()], left if due is None else min(left, due))
            else:
                time.sleep(min(left, 0.05))

    def _turn(self) -> None:
        now = time.monotonic()
        if not self._wanted:
            return
        try:
            if not self._link.is_open:
                if now < self._retry_at:
                    return
                self._open()
                self._down_since = None
                logger.debug("subscription renewed")
            for reply in self._link.poll():
                self._handle(reply)
            if self._asked and now - self._heard >= PING_EVERY + PING_PATIENCE:
                self._link.close()
                raise StoreConnectionError("no sign of life in time")
            if not self._asked and now - self._heard >= PING_EVERY:
                self._asked = True
                self._link.send(pack("PING"))
        except StoreConnectionError as error:
            self._confirmed.clear()
            self._retry_at = time.monotonic() + 0.2
            if self._down_since is None:
                self._down_since = now
            elif now - self._down_since >= self._engine.settings.reconnect_timeout:
                self._down_since = None
                raise StoreConnectionError(f"the store cannot be reached: {error}") from error

    def _open(self) -> None:
        self._link.open()
        self._confirmed.clear()
        self._heard, self._asked = time.monotonic(), False
        self._link.send(pack("PSUBSCRIBE", *dict.fromkeys(self._wanted.values())))

    def _handle(self, reply: Any) -> None:
        self._heard, self._asked = time.monotonic(), False
        if isinstance(reply, ReplyError) or not isinstance(reply, list):
            raise StoreConnectionError(f"unexpected answer to a subscription: {reply}")
        if reply[0] == b"psubscribe":
            self._confirmed.add(reply[1].decode("utf-8", "surrogateescape"))
        elif reply[0] == b"pmessage":
            self._arrived(reply[1].decode("utf-8", "surrogateescape"), reply[2], reply[3])

    def _arrived(self, channel: str, source: bytes, data: bytes) -> None:
        try:
            size = int(data[:data.index(b":", 0, 12)])
            start = data.index(b":") + 1
            key = data[start:start + size].decode("utf-8", "surrogateescape")
            message = decode(data[start + size:])
        except ValueError as error:
            logger.warning("broadcast on %r is none of ours: %s", source, error)
            return
        for (topic, pattern), wanted in self._wanted.items():
            address = self._engine.keys.topic(topic, key).encode("utf-8", "surrogateescape")
            if address == source and matches(pattern, key):
                # it comes once for each of our patterns that covers it: the first one counts
                if wanted == channel:
                    self._inbox.append((topic, key, message))
                break

    def sources(self) -> Sequence[int]:
        return [self._link.fileno()] if self._link.is_open else []

    def due(self) -> float | None:
        if not self._wanted:
            return None
        now = time.monotonic()
        if self._inbox:
            return 0.0
        if not self._link.is_open:
            return max(0.0, self._retry_at - now)
        return max(0.0, self._heard + PING_EVERY + (PING_PATIENCE if self._asked else 0.0) - now)

    def close(self) -> None:
        self._closed = True
        if not self._engine.forked():
            self._link.close()

    def _check(self) -> None:
        if self._closed or self._engine.forked():
            raise Closed("the subscription is closed")

    def after_fork(self) -> None:
        self._link.abandon()
        self._closed = True


def pack_broadcast(key: str, data: bytes) -> bytes:
    name = key.encode("utf-8", "surrogateescape")
    return b"%d:%b%b" % (len(name), name, data)
