"""Which of the messages that wait here are handed out: last-chance messages one at a time, some of them alone.

The rules are those of the memory engine (`streambroker.engines.memory.queue`), applied to what this process has. What
it may not hand out now goes to others, uncounted, and comes back later when nobody else wants it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from ...message import Delivery

if TYPE_CHECKING:
    from .consumer import JetStreamConsumer
    from .engine import JetStreamEngine
    from .lane import Lane

#: longest time, in seconds, for which a last-chance message keeps others from its holder
TRIAL = 5.0
#: how long a last-chance message waits here for its turn (seconds)
PARK = 0.25
#: how long a message that was passed on is not offered again, by how often it was passed on, and when so many were in
#: the last second (seconds)
PASSES, CROWD, CROWDED = (0.0, 0.05, 0.1, 0.2), 50, 1.0
#: how long a driver who was woken may take to come (seconds)
STILL = 1.0
#: pause before a message is looked at again that may have been taken by others (seconds)
UNSURE = 0.1


class Choice:
    """Of one consumer; under its lock."""

    def __init__(self, engine: JetStreamEngine, consumer: JetStreamConsumer) -> None:
        self._engine = engine
        self._consumer = consumer
        self._until: float | None = None
        #: whether one may wait here
        self.suspects = False
        #: monotonic time of the last call of `pick`
        self._picked = time.monotonic()
        self._passed: deque[float] = deque(maxlen=CROWD)

    def due(self) -> float | None:
        """Seconds until something that waits here may be handed out; None when nothing waits for a time."""
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def seen(self, now: float) -> None:
        """The driver was here, and there was nothing for him."""
        self._picked = now

    def pick(self, limit: int) -> list[Delivery]:
        self._picked = now = time.monotonic()
        self._until = None
        got: list[Delivery] = []
        for lane in self._order():
            while lane.pool and len(got) < limit:
                if self._unsure(lane.pool[0]):
                    # the watch asks the others
                    self._soon(now + UNSURE)
                    break
                delivery = self._next(lane.queue, lane.pool, now)
                if delivery is None:
                    break
                lane.pool.remove(delivery)
                if delivery.lost:
                    self._engine.holder.drop(delivery)
                    continue
                if self._expired(delivery):
                    self._engine.expire(delivery, self._consumer)
                    continue
                if not self._consumer.no_ack:
                    self._engine.holder.hand(delivery)
                elif not self._consumer.forget(delivery):
                    continue
                got.append(delivery)
        self.release(now)
        return got

    def _order(self) -> list[Lane]:
        """Where suspects of several lanes wait, that one comes first which had to leave the others alone most often."""
        lanes = self._consumer.order()
        if not self.suspects:
            return lanes
        waiting = [lane for lane in lanes if any(each.place.last for each in lane.pool)]
        self.suspects = bool(waiting)
        if len(waiting) > 1:
            lanes.sort(reverse=True, key=lambda lane: max(
                (each.place.book.bounces for each in lane.pool if each.place.book), default=0))
        return lanes

    def leave(self) -> list[Delivery]:
        """All that may be handed out and waits for nothing, taken out of here."""
        left: list[Delivery] = []
        for lane in self._consumer.lanes:
            left += [each for each in lane.pool if not each.place.last]
            lane.pool[:] = [each for each in lane.pool if each.place.last]
        return left

    def _unsure(self, delivery: Delivery) -> bool:
        return not self._consumer.no_ack and not delivery.lost and delivery.place.unsure

    def release(self, now: float) -> None:
        """What waits behind a message on trial goes to others after a moment: most trials are short."""
        for lane in self._consumer.lanes:
            if lane.pool and self._engine.trials:
                for delivery in [each for each in lane.pool if each.place.last]:
                    if now - delivery.place.got >= PARK:
                        lane.pool.remove(delivery)
                        self._pass_on(delivery, now)
                    else:
                        self._soon(delivery.place.got + PARK)

    def abandoned(self, now: float) -> bool:
        """Whether something came long after the driver had been here, and he does not come for it though he was woken:
        his loop stands still. It goes to others."""
        if self._consumer.no_ack or now - self._picked < 2 * STILL:
            return False
        found = False
        for lane in self._consumer.lanes:
            late = [each for each in lane.pool if self._picked + STILL < each.place.got < now - STILL]
            if late:
                found = True
                lane.pool[:] = [each for each in lane.pool if each not in late]
                self._consumer.hand_back(late)
        return found

    def _next(self, queue: str, pool: list[Delivery], now: float) -> Delivery | None:
        engine, trials = self._engine, self._engine.trials
        if not trials and trials.emptying is None and not pool[0].place.last:
            return pool[0]
        company = len(engine.holder.handed)
        if trials.emptying is not None and trials.emptying <= now:
            trials.lapse()
        lapsed = trials.lapsed
        trial = trials.within(now)
        if trial is not None and trial.strict:
            self._soon(trial.until)
            return None
        waits = trials.emptying is not None and not lapsed and company > 0
        if trial is None:
            limit = engine.queues.limit_of(queue)
            for suspect in [each for each in pool if each.place.last and not self._unsure(each)]:
                strict = suspect.count - 1 >= limit and not lapsed
                if strict and company:
                    waits = True
                    continue
                if not waits:
                    trials.emptying = None
                self._try(suspect, strict=strict, alone=not company, now=now)
                return suspect
        if waits:
            if trials.emptying is None:
                trials.emptying = now + self._time()
            self._soon(trials.emptying)
            return None
        plain = next((each for each in pool if not each.place.last and not self._unsure(each)), None)
        if plain is not None:
            trials.joined()
        return plain

    def _try(self, suspect: Delivery, *, strict: bool, alone: bool, now: float) -> None:
        if not self._consumer.no_ack:
            until = now + self._time()
            self._engine.trials.begin(suspect, strict=strict, alone=alone, until=until)
            self._soon(until)

    def _expired(self, delivery: Delivery) -> bool:
        ends: float = delivery.place.ends
        return ends != float("inf") and self._engine.streams.now() >= ends

    def _time(self) -> float:
        return min(self._engine.lease, TRIAL)

    def _soon(self, when: float) -> None:
        self._until = when if self._until is None else min(self._until, when)

    def _pass_on(self, delivery: Delivery, now: float) -> None:
        """To another process, or to this one later."""
        bounces = delivery.place.book.bounces if delivery.place.book else 0
        self._passed.append(now)
        crowded = len(self._passed) == CROWD and self._passed[0] > now - 1.0
        self._consumer.pass_on(delivery, CROWDED if crowded else PASSES[min(bounces, len(PASSES) - 1)])
