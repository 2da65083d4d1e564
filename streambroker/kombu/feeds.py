"""Where a connection's messages come from, and how they reach the callbacks: one feed for each engine consumer."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import StoreConnectionError, StoreError
from ..message import Delivery

if TYPE_CHECKING:
    from ..engine import Consumer
    from .channel import Channel
    from .message import Message

logger = logging.getLogger(__name__)
Got = TypeVar("Got")

#: longest time that one turn spends in callbacks before the event loop gets its turn again. A solo pool runs its tasks
#: inside the callback: with a longer turn a signal to stop would wait for all that was fetched
SLICE = 0.02
#: how long fewer free places than half of the prefetch wait for more, so that one request serves several messages
GATHER = 0.005
#: how long a feed rests when the store refused its request
REST = 1.0
#: most messages without acknowledgement that are fetched at once
NO_ACK_FETCH = 64


class Listener(NamedTuple):
    """A consumer as Kombu knows it."""

    tag: str
    queue: str
    no_ack: bool
    callback: Callable[[Message], Any]
    channel: Channel


class Feed(ABC):
    """Driven by one thread or greenlet at a time: the event loop or whoever drains the connection."""

    def __init__(self) -> None:
        self._rest_until = 0.0
        self._told = 0.0

    @abstractmethod
    def pump(self, most: int | None = None) -> int:
        """Send what is due, take what has arrived, hand it over, at most `most`; how many. Never waits.

        Raises StoreConnectionError when the link cannot be mended, and whatever a callback raises.
        """

    @abstractmethod
    def sources(self) -> Sequence[int]: ...

    @abstractmethod
    def due(self) -> float | None:
        """Seconds until `pump` must be called even if no source is readable."""

    @property
    @abstractmethod
    def one_by_one(self) -> bool:
        """Whether a drain hands over one message at most: Kombu's mailboxes count drains, not messages."""

    @abstractmethod
    def is_quiet(self) -> bool:
        """Whether `pump` is needed only when a source is readable: nothing to send, nothing due."""

    @property
    def saturated(self) -> bool:
        """Whether it could not hand over anything, since the prefetch is used up."""
        return False

    def _ask(self, receive: Callable[[], list[Got]]) -> list[Got]:
        """A refusal of the store concerns an operation, not the link: it is told, and asked again later. It must not
        reach Celery's event loop, which ends the worker for it."""
        if self._rest_until:
            if time.monotonic() < self._rest_until:
                return []
            self._rest_until = 0.0
        try:
            return receive()
        except StoreConnectionError:
            raise
        except StoreError as error:
            now = time.monotonic()
            self._rest_until = now + REST
            if now - self._told > 30 * REST:
                self._told = now
                logger.error("receiving is refused by the store and is tried again every %g s: %s", REST, error)
            return []

    def _resting(self) -> float | None:
        return max(0.0, self._rest_until - time.monotonic()) if self._rest_until else None


class Intake(Feed):
    """The stored queues of one channel that are consumed in one way, with or without acknowledgement."""

    def __init__(self, channel: Channel, *, no_ack: bool) -> None:
        super().__init__()
        self.channel = channel
        self.no_ack = no_ack
        self.consumer: Consumer = channel.shared.engine.consume([], no_ack=no_ack)
        self._opened = channel.transport().opened
        self._opened.append(self.consumer)
        self.listeners: dict[str, deque[Listener]] = {}
        self._ready: deque[Delivery] = deque()
        self._gather_until = 0.0
        self._closed = False

    def add(self, listener: Listener) -> None:
        there = self.listeners.get(listener.queue)
        if there is None:
            self.consumer.add(listener.queue)
            self.listeners[listener.queue] = deque([listener])
        else:
            there.append(listener)

    def remove(self, listener: Listener) -> bool:
        """Whether it was the last listener of its queue."""
        there = self.listeners.get(listener.queue)
        if there is None or listener not in there:
            return False
        there.remove(listener)
        if there:
            return False
        del self.listeners[listener.queue]
        # in their order: what the consumer still has comes after these
        self._give_back([delivery for delivery in self._ready if delivery.queue == listener.queue])
        self.consumer.discard(listener.queue)
        return True

    def pump(self, most: int | None = None) -> int:
        handed, stop = 0, 0.0
        while True:
            limit = self._limit()
            arrived = self._ask(lambda: self.consumer.receive(0, limit))  # noqa: B023  called at once
            self._ready.extend(arrived)
            before = handed
            while self._ready and (self.no_ack or self.channel.qos.can_consume()) and self.channel.flowing:
                if handed == most:
                    return handed
                stop = stop or time.monotonic() + SLICE
                self._hand_over(self._ready.popleft())
                handed += 1
                if time.monotonic() > stop:
                    return handed
            if self._ready and not self.no_ack:
                # the prefetch has shrunk meanwhile: others can have them
                self._give_back(list(self._ready))
            if handed in (before, most) or self._closed:
                return handed

    def sources(self) -> Sequence[int]:
        return self.consumer.sources()

    def due(self) -> float | None:
        if self._ready and self.channel.flowing:
            return 0.0
        resting = self._resting()
        if resting is not None:
            return resting
        gathered = max(0.0, self._gather_until - time.monotonic()) if self._gather_until else None
        return min((when for when in (self.consumer.due(), gathered, self.channel.qos.growing()) if when is not None),
                   default=None)

    @property
    def one_by_one(self) -> bool:
        return self.no_ack

    def is_quiet(self) -> bool:
        return self.no_ack and not self.listeners and not self._ready

    @property
    def saturated(self) -> bool:
        return not self.no_ack and bool(self.listeners) and not self.channel.qos.can_consume()

    def close(self, keep: Sequence[Delivery] = ()) -> None:
        self._closed = True
        self._ready.clear()
        self.listeners.clear()
        self._opened.remove(self.consumer)
        self.consumer.close(keep)

    def _limit(self) -> int:
        qos = self.channel.qos
        free = qos.free(len(self._ready))
        if not self.channel.flowing or not self.listeners:
            return 0
        if self.no_ack:
            return max(0, NO_ACK_FETCH - len(self._ready))
        if free <= 0 or 2 * free >= qos.prefetch_count:
            self._gather_until = 0.0
            return free
        now = time.monotonic()
        if not self._gather_until:
            self._gather_until = now + GATHER
        elif now >= self._gather_until:
            self._gather_until = 0.0
            return free
        return 0

    def _hand_over(self, delivery: Delivery) -> None:
        listeners = self.listeners.get(delivery.queue)
        if listeners is None:
            self._give_back([delivery])
            return
        listener = listeners[0]
        if len(listeners) > 1:
            listeners.rotate(-1)
        self.channel.deliver(delivery, self.consumer, listener)

    def _give_back(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            gone = {id(delivery) for delivery in deliveries}
            self._ready = deque(delivery for delivery in self._ready if id(delivery) not in gone)
            if not self.no_ack:
                self.consumer.hand_back(deliveries)
