"""What a consumer asks the store for, as prepared commands, and the answer as deliveries."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from ...message import Delivery, Message
from .keys import GROUP, ONCE
from .link import translate
from .publisher import decode
from .resp import ReplyError
from .scripts import script

if TYPE_CHECKING:
    from .consumer import RedisConsumer
    from .engine import RedisStreamsEngine

#: beyond this many queues the turn does not change with every take: preparing it would cost more than it brings
ROTATED = 32
#: how long (seconds, at most a lease) a message on its last allowed delivery is kept apart from other such messages
TRIAL = 5.0


class TakePlan:
    """The queues of one consumer, in their order, and the prepared takes over them."""

    def __init__(self, engine: RedisStreamsEngine, no_ack: bool) -> None:
        self._engine = engine
        self._no_ack = no_ack
        self.queues: list[str] = []
        self.bells: list[str] = []
        # not everywhere the same queue first: suspects of two queues would meet each time
        self._turn = random.randrange(ROTATED)
        self._prepared: dict[tuple[int | str, bool], tuple[bytes, list[str]]] = {}
        self._epoch = -1
        self._refresh: list[tuple[float, bytes]] = []
        #: monotonic time when transient queues must be kept in being again
        self.next_refresh = 0.0

    def add(self, queue: str) -> None:
        self.queues = [*self.queues, queue]
        self._changed()

    def discard(self, queue: str) -> None:
        self.queues = [name for name in self.queues if name != queue]
        self._changed()

    def _changed(self) -> None:
        if self._engine.settings.queue_order_strategy == "sorted":
            self.queues.sort()
        self.bells = [self._engine.keys.bell(queue) for queue in self.queues]
        self._prepared.clear()
        self._refresh = self._engine.refreshes(self.queues)
        self.next_refresh = 0.0 if self._refresh else float("inf")

    def refresh(self, now: float) -> list[bytes]:
        """Commands that keep transient queues in being, when they are due."""
        if not self._refresh or now < self.next_refresh:
            return []
        self.next_refresh = now + min(pause for pause, _ in self._refresh)
        return [data for _, data in self._refresh]

    def take(self, count: int, look: bool) -> tuple[bytes, list[str]]:
        """The packed command, and the queues by their number in its answer."""
        self._follow()
        turn = self._next_turn()
        head, queues = self._prepared.get((turn, look)) or self._prepare(
            turn, look, self.queues[turn:] + self.queues[:turn])
        number = b"%d" % count
        return b"%b$%d\r\n%b\r\n" % (head, len(number), number), queues

    def take_from(self, queue: str, count: int, look: bool) -> bytes:
        """The packed command for one queue alone."""
        self._follow()
        head, _ = self._prepared.get((queue, look)) or self._prepare(queue, look, [queue])
        number = b"%d" % count
        return b"%b$%d\r\n%b\r\n" % (head, len(number), number)

    def order(self) -> list[str]:
        """The queues in the order to serve them this time, where they are asked one by one."""
        turn = self._next_turn()
        return self.queues[turn:] + self.queues[:turn]

    def _follow(self) -> None:
        if self._epoch != self._engine.holder.epoch:
            self._epoch = self._engine.holder.epoch
            self._prepared.clear()

    def _next_turn(self) -> int:
        if self._engine.settings.queue_order_strategy == "round_robin" and 1 < len(self.queues) <= ROTATED:
            self._turn = (self._turn + 1) % len(self.queues)
            return self._turn
        return 0

    def _prepare(self, name: int | str, look: bool, queues: list[str]) -> tuple[bytes, list[str]]:
        engine = self._engine
        steps = engine.steps
        words: list[Any] = [GROUP, ONCE if self._no_ack else engine.holder.name, int(self._no_ack), int(look),
                            int(min(engine.settings.visibility_timeout, TRIAL) * 1000), len(steps), *steps]
        for queue in queues:
            words += [0 if self._no_ack else engine.limit_of(queue), engine.ttl_of(queue)]
        [(_, keys)] = engine.keys.scopes(queues)
        count, packed = script("take").prepared(keys, *words)
        self._prepared[name, look] = result = (b"*%d\r\n" % (count + 1) + packed, queues)
        return result


def to_deliveries(engine: RedisStreamsEngine, consumer: RedisConsumer, queues: list[str],
                  reply: list[Any]) -> list[Delivery]:
    """Deliveries of a take's answer. Entries that are none of ours become dead letters, those of a queue that is not
    consumed any more go back."""
    deliveries: list[Delivery] = []
    for row in reply[1:]:
        queue = queues[row[0] - 1]
        if len(row) == 2:
            refusal = translate(ReplyError(row[1].decode(errors="replace")))
            engine.chores.report(f"queue {queue!r} cannot be read: {refusal}")
            continue
        _, step, entry, count, back, fields = row
        entry_id = f"{step.decode()}:{entry.decode()}"
        try:
            if fields[0] != b"m":
                raise ValueError("no message field")
            message = decode(fields[1], int(step))
        except ValueError as error:
            broken = Delivery(queue, entry_id, Message(b""), count)
            engine.chores.report(f"queue {queue!r} has entries that are no messages: {broken.id} is buried, {error}")
            consumer.dead_letter(broken, f"not a message: {error}")
            continue
        delivery = Delivery(queue, entry_id, message, count, back == 1,
                            replayed=len(fields) > 2 and b"r" in fields[2::2])
        if not consumer.no_ack:
            if not engine.holder.hold(delivery):
                continue
            consumer.held[queue, delivery.id] = delivery
        if queue in consumer.queues:
            deliveries.append(delivery)
        else:
            consumer.hand_back([delivery])
    return deliveries
