"""Receiving: consumers of queues and subscriptions to topics, with a pipe that tells when to call."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ...errors import Closed
from ...message import Delivery, Message, printable
from .queue import Entry, Queue
from .store import Grave

if TYPE_CHECKING:
    from .engine import MemoryEngine

logger = logging.getLogger(__name__)
Got = TypeVar("Got")

#: seconds before a dead letter that its forwarder did not take is offered again
OFFER_AGAIN = 1.0


class Wake:
    """A pipe that is readable while it is set."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self._set = False

    def fds(self) -> tuple[int, ...]:
        return () if self._out < 0 else (self._out,)

    def set(self, on: bool) -> None:
        if on == self._set or self._out < 0:
            return
        self._set = on
        if on:
            os.write(self._in, b"!")
        else:
            os.read(self._out, 1)

    def close(self) -> None:
        if self._out >= 0:
            os.close(self._out)
            os.close(self._in)
            self._out = self._in = -1


class Receiver:
    """What consumers and subscriptions share: waiting, the pipe, closing."""

    def __init__(self, engine: MemoryEngine) -> None:
        self.engine = engine
        self.store = engine.store
        self.closed = False
        self._wake = Wake()
        self.store.listeners.append(self)

    def notice(self) -> None:
        """Called at the end of each turn of the store."""
        self._wake.set(self._has_something())

    def sources(self) -> Sequence[int]:
        return self._wake.fds()

    def due(self) -> float | None:
        with self.engine.turn():
            at = self._next_event()
            return None if at is None else max(0.0, at - self.store.now)

    def _wait(self, timeout: float, poll: Callable[[], list[Got]]) -> list[Got]:
        deadline = time.monotonic() + timeout
        while True:
            with self.engine.turn():
                if self.closed:
                    raise Closed("this consumer was closed; make a new one")
                got = poll()
                event = self._next_event()
                left = deadline - time.monotonic()
                if got or left <= 0:
                    return got
                pause = left if event is None else min(left, max(0.001, event - self.store.now))
            with self.store.lock:
                if not (self.closed or self._has_something()):
                    self.store.changed.wait(pause)

    def _has_something(self) -> bool:
        raise NotImplementedError

    def _next_event(self) -> float | None:
        return None

    def shut(self) -> None:
        """Stop without a word, as a killed process does."""
        self.closed = True
        self.store.listeners.remove(self)
        self._wake.close()


class MemoryConsumer(Receiver):
    """See `streambroker.engine.Consumer`. Fetches nothing ahead: what was not received is still in the store."""

    def __init__(self, engine: MemoryEngine, queues: Sequence[str], *, no_ack: bool) -> None:
        super().__init__(engine)
        self._queues: list[str] = []
        self._turn = 0
        self._no_ack = no_ack
        self._armed = True
        self._held: dict[Delivery, None] = {}
        for queue in queues:
            self.add(queue)

    def add(self, queue: str) -> None:
        with self.engine.turn():
            if queue not in self._queues:
                self._queues.append(queue)
                consuming = self.engine.holder.consuming
                consuming[queue] = consuming.get(queue, 0) + 1

    def discard(self, queue: str) -> None:
        with self.engine.turn():
            if queue in self._queues:
                self._queues.remove(queue)
                self._leave(queue)

    def receive(self, timeout: float, limit: int = 1) -> list[Delivery]:
        def poll() -> list[Delivery]:
            self._armed = limit > 0
            self._forward()
            return list(self._take(limit))

        return self._wait(timeout if limit > 0 else 0.0, poll)

    def fetch(self, limit: int = 1) -> list[Delivery]:
        return self.receive(0, limit)

    def ack(self, delivery: Delivery) -> None:
        self._settle(delivery, lambda queue, entry: None)

    def ack_now(self, delivery: Delivery) -> None:
        self.ack(delivery)

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        self._settle(delivery, lambda queue, entry: self.store.reject(queue, entry, self.engine.holder, delay))

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        for delivery in list(deliveries):
            self._settle(delivery, lambda queue, entry: self.store.give_back(queue, entry, counted=False))

    def dead_letter(self, delivery: Delivery, reason: str, message: Message | None = None) -> None:
        def bury(queue: Queue, entry: Entry) -> None:
            self.store.bury(queue, entry, self.engine.holder, printable(reason), message)

        self._settle(delivery, bury)

    def close(self, keep: Collection[Delivery] = ()) -> None:
        if self.closed or self.engine.foreign():
            return
        with self.engine.turn():
            kept = {id(delivery) for delivery in keep}
            self.hand_back([delivery for delivery in self._held if id(delivery) not in kept])
            for queue in self._queues:
                self._leave(queue)
            self.shut()
            self.engine.receivers.remove(self)

    def _settle(self, delivery: Delivery, action: Callable[[Queue, Entry], None]) -> None:
        if delivery.settled or self.engine.unusable():
            return
        with self.engine.turn():
            delivery.settled = True
            self._held.pop(delivery, None)
            found = self.store.settle(delivery)
            if found is None:
                delivery.lost = True
                logger.debug("message %s of %s is not held here any more, nothing is settled", delivery.id,
                             delivery.queue)
            else:
                action(*found)

    def _take(self, limit: int) -> Iterator[Delivery]:
        for name in self._queues:
            if name in self.store.queues:
                self.store.queues[name].touched = self.store.now
        while limit > 0:
            for name in self._order():
                queue = self.store.queues.get(name)
                delivery = queue and self.store.hand_out(queue, self.engine.holder, no_ack=self._no_ack)
                if delivery:
                    break
            else:
                return
            self._turn = self._queues.index(name) + 1
            if not self._no_ack:
                self._held[delivery] = None
            limit -= 1
            yield delivery

    def _order(self) -> list[str]:
        strategy = self.engine.settings.queue_order_strategy
        if strategy == "sorted":
            return sorted(self._queues)
        turn = self._turn % len(self._queues) if self._queues and strategy == "round_robin" else 0
        return self._queues[turn:] + self._queues[:turn]

    def _has_something(self) -> bool:
        queues = [self.store.queues[name] for name in self._queues if name in self.store.queues]
        holder, now = self.engine.holder, self.store.now
        ready = self._armed and any(queue.choose(holder, now).entry for queue in queues)
        return ready or any(self._offers()) or any(self.store.convicted[name] for name in self._told())

    def _next_event(self) -> float | None:
        times = [self.store.next_event(name) for name in self._queues]
        times += [grave.offer for name in self._queues for grave in self.engine.offers(name)]
        return min((time for time in times if time is not None), default=None)

    def _offers(self) -> list[Grave]:
        graves = [grave for name in self._queues for grave in self.engine.offers(name)]
        return [grave for grave in graves if grave.offer <= self.store.now]

    def _told(self) -> list[str]:
        return [name for name in self._queues if name in self.engine.tellers]

    def _forward(self) -> None:
        for name in self._told():
            while self.store.convicted[name]:
                self.engine.tellers[name](self.store.convicted[name].popleft())
        for grave in self._offers():
            letter = grave.letter
            grave.offer = self.store.now + OFFER_AGAIN
            try:
                stored = self.engine.forwards[letter.queue](letter)
            except Exception:
                logger.exception("dead letter %s of %s could not be forwarded, it is kept", letter.id, letter.queue)
            else:
                if stored:
                    self.store.graves.get(letter.queue, {}).pop(letter.id, None)

    def _leave(self, queue: str) -> None:
        consuming = self.engine.holder.consuming
        consuming[queue] -= 1
        if not consuming[queue]:
            del consuming[queue]
        if queue in self.store.queues:
            self.store.queues[queue].touched = self.store.now


class MemorySubscription(Receiver):
    """See `streambroker.engine.Subscription`."""

    def __init__(self, engine: MemoryEngine) -> None:
        super().__init__(engine)
        self._topics: set[tuple[str, str]] = set()
        self._arrived: deque[tuple[str, str, Message]] = deque()
        self.store.topics.append(self._hear)

    def add(self, topic: str, pattern: str = "") -> None:
        with self.engine.turn():
            self._topics.add((topic, pattern))

    def discard(self, topic: str, pattern: str = "") -> None:
        with self.engine.turn():
            self._topics.discard((topic, pattern))

    def receive(self, timeout: float) -> list[tuple[str, str, Message]]:
        def poll() -> list[tuple[str, str, Message]]:
            got = list(self._arrived)
            self._arrived.clear()
            return got

        return self._wait(timeout, poll)

    def close(self) -> None:
        if self.closed or self.engine.foreign():
            return
        with self.engine.turn():
            self.shut()
            self.engine.receivers.remove(self)

    def shut(self) -> None:
        super().shut()
        self.store.topics.remove(self._hear)

    def _hear(self, topic: str, key: str, message: Message) -> None:
        if any(each == topic and matches(pattern, key) for each, pattern in self._topics):
            self._arrived.append((topic, key, message))

    def _has_something(self) -> bool:
        return bool(self._arrived)


def matches(pattern: str, key: str) -> bool:
    """Whether a binding pattern takes a key: `*` is one word, `#` any number of them, none too; empty takes all."""
    def fits(patterns: list[str], words: list[str]) -> bool:
        if not patterns:
            return not words
        if patterns[0] == "#":
            return any(fits(patterns[1:], words[skip:]) for skip in range(len(words) + 1))
        return bool(words) and patterns[0] in ("*", words[0]) and fits(patterns[1:], words[1:])

    return not pattern or fits(pattern.split("."), key.split("."))
