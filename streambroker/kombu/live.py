"""Live queues: what is broadcast goes straight to those who listen, and is stored nowhere.

A queue of one connection that is bound to a fanout or topic exchange (a worker's mailbox, an event receiver) is such a
queue. Messages wait in this process until they are consumed.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ..message import Delivery, Message
from .feeds import SLICE, Feed, Listener
from .routing import Binding, Exchange

if TYPE_CHECKING:
    from ..engine import Subscription
    from ..message import QueueSpec
    from .channel import Channel
    from .shared import Closable, SharedEngine

logger = logging.getLogger(__name__)

#: most messages that wait in one live queue when its declaration names no number; older ones go first
MAX_WAITING = 10_000

_numbers = itertools.count(1)


class LiveQueue:
    """Settles its own deliveries: there is nothing to acknowledge, and what is given back waits here again."""

    def __init__(self, spec: QueueSpec, auto_delete: bool) -> None:
        self.name = spec.name
        self.auto_delete = auto_delete
        self.bindings: dict[Binding, Exchange] = {}
        self.listeners: deque[Listener] = deque()
        self._ttl = spec.message_ttl
        self._waiting: deque[tuple[float, Delivery]] = deque(maxlen=spec.max_length or MAX_WAITING)

    def wants(self, topic: str, key: str) -> bool:
        return any(topic == binding.exchange and binding.takes(exchange, key)
                   for binding, exchange in self.bindings.items())

    def topics(self) -> set[tuple[str, str]]:
        """(topic, pattern) to listen to."""
        return {(binding.exchange, binding.pattern(exchange)) for binding, exchange in self.bindings.items()}

    def put(self, message: Message) -> None:
        self._waiting.append((time.monotonic(), Delivery(self.name, f"live-{next(_numbers)}", message)))

    def take(self) -> Delivery | None:
        while self._waiting:
            since, delivery = self._waiting.popleft()
            if self._ttl is None or time.monotonic() - since < self._ttl:
                return delivery
        return None

    def purge(self) -> int:
        count = len(self._waiting)
        self._waiting.clear()
        return count

    def __len__(self) -> int:
        return len(self._waiting)

    def ack(self, delivery: Delivery) -> None:
        delivery.settled = True

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        delivery.count += 1
        self.hand_back([delivery])

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        for delivery in reversed(list(deliveries)):
            delivery.redelivered = True
            self._waiting.appendleft((time.monotonic(), delivery))

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        delivery.settled = True


class LiveQueues(Feed):
    """The live queues of one connection, over one subscription."""

    def __init__(self, shared: SharedEngine, opened: list[Closable]) -> None:
        super().__init__()
        self._shared = shared
        self._opened = opened
        self._queues: dict[str, LiveQueue] = {}
        self._subscription: Subscription | None = None
        # a drain and a `basic_get` of two threads must not read the subscription at once
        self._reading = threading.Lock()

    def get(self, queue: str) -> LiveQueue | None:
        return self._queues.get(queue)

    def bind(self, spec: QueueSpec, auto_delete: bool, exchange: Exchange, binding: Binding) -> None:
        """Listens when it returns. Raises StoreConnectionError."""
        if self._subscription is None:
            self._subscription = self._shared.engine.subscribe()
            self._opened.append(self._subscription)
        self._subscription.add(binding.exchange, binding.pattern(exchange))
        queue = self._queues.get(spec.name)
        if queue is None:
            queue = self._queues[spec.name] = LiveQueue(spec, auto_delete)
        queue.bindings[binding] = exchange

    def unbind(self, binding: Binding) -> bool:
        """Whether it was bound here."""
        queue = self._queues.get(binding.queue)
        if queue is None or binding not in queue.bindings:
            return False
        before = queue.topics()
        del queue.bindings[binding]
        self._stop_listening(before - queue.topics())
        return True

    def delete(self, queue: LiveQueue) -> int:
        if self._queues.pop(queue.name, None) is not None:
            self._stop_listening(queue.topics())
        return queue.purge()

    def drop_channel(self, channel: Channel) -> None:
        """Without a word to the store."""
        for queue in self._queues.values():
            for listener in [listener for listener in queue.listeners if listener.channel is channel]:
                queue.listeners.remove(listener)

    def _stop_listening(self, topics: set[tuple[str, str]]) -> None:
        wanted = set().union(*(queue.topics() for queue in self._queues.values()))
        for topic, pattern in topics - wanted:
            if self._subscription is not None:
                self._subscription.discard(topic, pattern)

    def pump(self, most: int | None = None) -> int:
        self.collect()
        handed, stop = 0, 0.0
        for queue in list(self._queues.values()):
            while queue.listeners and len(queue) and handed != most:
                listener = queue.listeners[0]
                channel = listener.channel
                if not channel.flowing or not (listener.no_ack or channel.qos.can_consume()):
                    break
                delivery = queue.take()
                if delivery is None:
                    break
                queue.listeners.rotate(-1)
                stop = stop or time.monotonic() + SLICE
                channel.deliver(delivery, queue, listener)
                handed += 1
                if time.monotonic() > stop:
                    return handed
        return handed

    def collect(self) -> None:
        """Put what has arrived into its queues."""
        subscription = self._subscription
        if subscription is None or not self._reading.acquire(blocking=False):
            return
        try:
            arrived = self._ask(lambda: subscription.receive(0))
        finally:
            self._reading.release()
        for topic, key, message in arrived:
            for queue in list(self._queues.values()):
                if queue.wants(topic, key):
                    queue.put(message)

    def sources(self) -> Sequence[int]:
        return () if self._subscription is None else self._subscription.sources()

    def due(self) -> float | None:
        if self._subscription is None:
            return None
        resting = self._resting()
        if resting is not None:
            return resting
        if any(len(queue) and any(listener.no_ack or listener.channel.qos.can_consume()
                                  for listener in queue.listeners) for queue in self._queues.values()):
            return 0.0
        return self._subscription.due()

    def is_quiet(self) -> bool:
        return self.due() != 0

    @property
    def one_by_one(self) -> bool:
        return True

    def close(self) -> None:
        self._queues.clear()
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
