"""The model: all queues, holders and dead letters, and what time does to them."""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...message import DeadLetter, Delivery, Message, QueueSpec
from .queue import Entry, Holder, Queue, Trial

Clock = Callable[[], float]

#: longest time, in seconds, for which a last-chance message keeps others from its holder
TRIAL = 5.0
#: convictions that are kept for whoever wants to know
CONVICTED = 100


class Listener(Protocol):
    """Who wants to be told when it could receive something."""

    def notice(self) -> None: ...


@dataclass(slots=True)
class Grave:
    """A dead letter, until when it is kept, and when it may be offered to a forwarder again."""

    letter: DeadLetter
    until: float
    offer: float = 0.0


class Store:
    """All state, under one lock. Everything but `turn` must be called inside a turn."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.wall = time.time() - clock()
        self.now = clock()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.queues: dict[str, Queue] = {}
        self.graves: dict[str, dict[str, Grave]] = {}
        #: those of them that nobody was told of yet; the newest, since perhaps nobody wants to know
        self.convicted: defaultdict[str, deque[DeadLetter]] = defaultdict(partial(deque, maxlen=CONVICTED))
        self.tables: dict[str, dict[str, tuple[str, str]]] = {}
        self.holders: list[Holder] = []
        self.listeners: list[Listener] = []
        self.topics: list[Callable[[str, str, Message], None]] = []
        self._seq = 0

    @contextmanager
    def turn(self) -> Iterator[Store]:
        """Exclusive use: first everything happens that time has brought, at the end those who wait are told."""
        with self.lock:
            self.now = self.clock()
            self._time_passes()
            try:
                yield self
            finally:
                for listener in self.listeners:
                    listener.notice()
                self.changed.notify_all()

    def posix(self) -> float:
        return self.wall + self.now

    # Queues

    def declare(self, spec: QueueSpec) -> Queue:
        queue = self.queues.get(spec.name)
        if queue is None:
            queue = self.queues[spec.name] = Queue(spec, self.now)
        queue.spec, queue.touched = spec, self.now
        return queue

    def remove(self, name: str) -> int:
        """The queue, its messages and its rows; how many messages waited."""
        for table in self.tables.values():
            for key in [key for key, (_, queue) in table.items() if queue == name]:
                del table[key]
        gone = self.queues.pop(name, None)
        if gone is None:
            return 0
        for entry in gone.unsettled():
            self._lose(gone, entry, taken=False)
        return gone.waiting()

    def consumers(self, name: str) -> int:
        return sum(name in holder.consuming for holder in self.holders)

    # The way in

    def add(self, queue: Queue, message: Message, steps: int) -> str:
        """`steps` is how many priorities there are: one beyond them is the last."""
        entry = self._entry(message._replace(priority=max(0, min(message.priority, steps - 1))))
        if message.delay > 0:
            queue.delay(entry, self.now + message.delay)
        else:
            self._append(queue, entry)
        return entry.id

    def replay(self, grave: Grave) -> None:
        """Back into its queue as if it were published now, without its delay."""
        queue = grave.letter.queue
        del self.graves[queue][grave.letter.id]
        entry = self._entry(grave.letter.message)
        entry.replayed = True
        self._append(self.queues[queue], entry)

    def _entry(self, message: Message) -> Entry:
        self._seq += 1
        return Entry(
            id=f"{self._seq:016d}", message=message, seq=self._seq, first=self.posix(), entered=self.now,
            ends=float("inf") if message.expires is None else self.now + message.expires)

    def _append(self, queue: Queue, entry: Entry) -> None:
        queue.put(entry)
        if queue.spec.max_length is not None:
            while len(queue.ready) > queue.spec.max_length:
                queue.take_out(min(queue.ready, key=lambda each: each.seq))

    # The way out

    def hand_out(self, queue: Queue, holder: Holder, *, no_ack: bool) -> Delivery | None:
        choice = queue.choose(holder, self.now)
        till = self.now + min(holder.settings.visibility_timeout, TRIAL)
        queue.wait(holder, choice, self.now, till)
        entry = choice.entry
        if entry is None:
            return None
        queue.take_out(entry)
        if choice.last and not no_ack:
            queue.trials[holder] = Trial(entry, choice.strict, till)
        entry.count += 1
        delivery = Delivery(queue.spec.name, entry.id, entry.message, entry.count, entry.returned, place=(queue, entry),
                            replayed=entry.replayed)
        if no_ack:
            delivery.settled = True
        else:
            entry.holder, entry.delivery, entry.since = holder, delivery, self.now
            queue.held.setdefault(holder, {})[entry] = None
        return delivery

    def leave(self, holder: Holder) -> None:
        """Everything that the holder still has goes back uncounted."""
        self.holders.remove(holder)
        for queue in self.queues.values():
            queue.forget(holder)
            for entry in list(queue.held.get(holder, ())):
                self._lose(queue, entry)
                self.give_back(queue, entry, counted=False)

    # Settling

    def settle(self, delivery: Delivery) -> tuple[Queue, Entry] | None:
        """Take the delivery from its holder; None when it is not the holder's any more."""
        queue, entry = delivery.place
        if entry.delivery is not delivery:
            return None
        self._let_go(queue, entry)
        return queue, entry

    def give_back(self, queue: Queue, entry: Entry, *, counted: bool = True) -> None:
        entry.returned = True
        if not counted:
            entry.count -= 1
        queue.put(entry)

    def reject(self, queue: Queue, entry: Entry, holder: Holder, delay: float) -> None:
        limit = queue.limit(holder)
        if limit and entry.count >= limit:
            self.bury(queue, entry, holder, f"delivery limit of {limit} reached: rejected with requeue")
        elif delay > 0:
            entry.returned = True
            queue.delay(entry, self.now + delay)
        else:
            self.give_back(queue, entry)

    def bury(self, queue: Queue, entry: Entry, holder: Holder, reason: str,
             message: Message | None = None) -> DeadLetter:
        graves = self.graves.setdefault(queue.spec.name, {})
        kept = entry.message if message is None else message._replace(priority=entry.message.priority)
        letter = DeadLetter(queue.spec.name, entry.id, kept, reason, entry.count, entry.first, self.posix(),
                            holder.name)
        graves[entry.id] = Grave(letter, self.now + holder.settings.dead_letter_max_age)
        while len(graves) > holder.settings.dead_letter_max_count:
            del graves[next(iter(graves))]
        return letter

    @staticmethod
    def _let_go(queue: Queue, entry: Entry) -> None:
        holder = entry.holder
        assert holder is not None
        held = queue.held[holder]
        del held[entry]
        if not held:
            del queue.held[holder]
        if holder in queue.trials and queue.trials[holder].entry is entry:
            del queue.trials[holder]
        entry.holder = entry.delivery = None

    @staticmethod
    def _lose(queue: Queue, entry: Entry, *, taken: bool = True) -> None:
        if entry.delivery is not None:
            entry.delivery.lost, entry.delivery.taken = True, taken
        Store._let_go(queue, entry)

    # Time

    def next_event(self, name: str) -> float | None:
        """When time will bring `name` something: the first delayed message, the end of a dead holder's lease."""
        queue = self.queues.get(name)
        if queue is None:
            return None
        times = [queue.delayed[0][0]] if queue.delayed else []
        times += [holder.died + holder.settings.visibility_timeout for holder in queue.held if holder.died is not None]
        times += [trial.until for trial in queue.trials.values()] + list(queue.waits.values())
        return min((time for time in times if time > self.now), default=None)

    def _time_passes(self) -> None:
        for holder in [each for each in self.holders if each.died is not None]:
            end = holder.died + holder.settings.visibility_timeout if holder.died is not None else 0.0
            if end <= self.now:
                self.holders.remove(holder)
                self._reclaim(holder, end)
        for name, queue in list(self.queues.items()):
            spec = queue.spec
            while queue.delayed and queue.delayed[0][0] <= self.now:
                due, _, entry = heapq.heappop(queue.delayed)
                self._seq += 1
                entry.seq, entry.entered = self._seq, due
                self._append(queue, entry)
            queue.expire(self.now)
            if spec.durable or spec.expires is None:
                continue
            if self.consumers(name):
                queue.touched = self.now
            elif self.now >= queue.touched + spec.expires:
                self.remove(name)
        for name, graves in list(self.graves.items()):
            for key in [key for key, grave in graves.items() if grave.until <= self.now]:
                del graves[key]
            if not graves:
                del self.graves[name]

    def _reclaim(self, holder: Holder, end: float) -> None:
        for name in holder.consuming:
            if name in self.queues:
                self.queues[name].touched = end
        for queue in self.queues.values():
            lost = list(queue.held.get(holder, ()))
            trial = queue.trials.get(holder)
            queue.forget(holder)
            limit = queue.limit(holder)
            for entry in lost:
                self._lose(queue, entry)
                suspect = trial is not None and trial.entry is entry
                if limit and suspect and entry.count >= limit and (len(lost) == 1 or entry.count >= 2 * limit):
                    self.convicted[queue.spec.name].append(
                        self.bury(queue, entry, holder, f"delivery limit of {limit} reached: its worker died"))
                    continue
                self.give_back(queue, entry)
