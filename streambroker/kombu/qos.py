"""What a channel has out: unsettled deliveries and how many more it may have."""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ..message import Delivery

if TYPE_CHECKING:
    from .channel import Channel
    from .message import Message

#: how long a greater prefetch count waits until it is used: Celery raises it for a task whose eta is over and lowers it
#: again within one turn of its loop; it would be given one more than it can start (seconds)
GROWTH = 0.02
#: how many deliveries are fetched at once when the prefetch count is 0, which means no limit
UNBOUNDED_FETCH = 64


class Settler(Protocol):
    """Where a delivery came from: an engine's consumer, or a live queue."""

    def ack(self, delivery: Delivery) -> None: ...

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None: ...

    def hand_back(self, deliveries: Collection[Delivery]) -> None: ...

    def dead_letter(self, delivery: Delivery, reason: str) -> None: ...


class Held:
    """One unsettled delivery. `message` is a weak reference: the application, not we, keeps the message alive, so that
    after a lost connection it shows which tasks are still there (Celery drops those that were only waiting)."""

    __slots__ = ("delivery", "message", "settler")

    def __init__(self, settler: Settler, delivery: Delivery, message: Message) -> None:
        self.settler = settler
        self.delivery = delivery
        self.message = weakref.ref(message)


class QoS:
    """Prefetch of one channel. Settling comes from any thread; dict operations of single tags are atomic."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.prefetch_count = 0
        self._before = 0
        self._grown_at = 0.0
        self._held: dict[str, Held] = {}

    def limit(self, count: int) -> None:
        """Set the prefetch count; 0 means no limit."""
        if 0 < self.prefetch_count < count:
            self._before, self._grown_at = self._fetching(), time.monotonic() + GROWTH
        else:
            self._before = 0
        self.prefetch_count = count

    def growing(self) -> float | None:
        """Seconds until more may be fetched because the count was raised; None when that is over."""
        return max(0.0, self._grown_at - time.monotonic()) if self._before else None

    def _fetching(self) -> int:
        """The prefetch count that is in use for fetching."""
        if self._before and time.monotonic() >= self._grown_at:
            self._before = 0
        return min(self._before, self.prefetch_count) if self._before else self.prefetch_count

    def can_consume(self) -> bool:
        """Whether one more delivery may be handed over. Celery replaces this method on the instance when
        `worker_disable_prefetch` is set."""
        return not self.prefetch_count or len(self._held) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        return max(0, self.prefetch_count - len(self._held)) if self.prefetch_count else None

    def free(self, waiting: int) -> int:
        """How many more may be fetched when `waiting` are fetched and not handed over."""
        if "can_consume" in self.__dict__:
            return int(not waiting and self.can_consume())
        count = self._fetching()
        most = count - len(self._held) if count else UNBOUNDED_FETCH
        return max(0, most - waiting)

    def hold(self, settler: Settler, delivery: Delivery, message: Message) -> None:
        self._held[message.delivery_tag] = Held(settler, delivery, message)

    def release(self, delivery_tag: str) -> Held | None:
        """Take it out, to settle it; None when it was settled before. The credit is free at once."""
        held = self._held.pop(delivery_tag, None)
        if held is not None:
            self.channel.credit_freed()
            if not self._held and self.channel.closed:
                self.channel.shared.keeping.discard(self)
        return held

    def deliveries(self) -> list[Delivery]:
        return [held.delivery for held in list(self._held.values())]

    def release_all(self) -> list[Held]:
        return [held for tag in list(self._held) if (held := self._held.pop(tag, None))]

    def keep_living(self) -> list[Delivery]:
        """After a lost connection: deliveries whose message is still in use stay, to be settled later or handed back
        when the message is gone; the others are forgotten here and left to the consumer's `close`."""
        kept = []
        for tag, held in list(self._held.items()):
            message = held.message()
            if message is None:
                self._held.pop(tag, None)
            else:
                held.message = weakref.ref(message, partial(self._abandon, tag))
                kept.append(held.delivery)
        return kept

    def _abandon(self, delivery_tag: str, reference: object) -> None:
        """The message died unsettled after its channel. Runs wherever the garbage collector does: takes no lock."""
        held = self._held.pop(delivery_tag, None)
        if held is not None:
            self.channel.shared.orphans.append(partial(held.settler.hand_back, [held.delivery]))
