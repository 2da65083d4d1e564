"""Receiving and settling."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...errors import Closed, StoreConnectionError
from ...message import Delivery
from ...readable import wait_readable
from ...real import Wakeup, make_lock
from .choice import Choice
from .frames import Reply
from .intake import Intake
from .lane import Lane, close_lanes
from .outage import Outage
from .pull import Pull
from .settling import Settling

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: how long receiving waits until what was given back is in the store (seconds)
PATIENCE = 0.1
#: how long closing waits for the store to do something, and as long as it does (seconds)
FAREWELL, LONGEST = 2.0, 30.0
#: a driver has no room when he says so for this long: he may only gather it (seconds)
FULL = 0.1
#: an event loop comes by many times for each message: when nothing has happened so long it is sent on at once (seconds)
AGAIN = 0.05
#: the server tells its consumers of a message a moment after it has confirmed it: nothing is found only when two looks
#: with this pause between them say so (seconds)
NEWS = 0.005
#: among as many queues the first one differs
TURNS = 720


class JetStreamConsumer(Settling):
    """See `streambroker.engine.Consumer`. Messages arrive in the link's thread and wait in their lanes."""

    def __init__(self, engine: JetStreamEngine, queues: Sequence[str], no_ack: bool) -> None:
        super().__init__(engine)
        self.no_ack = no_ack
        self.closed = False
        self.lanes: list[Lane] = []
        self.queues: list[str] = []
        # not everywhere the same queue first: suspects of two queues would meet each time
        self._turn = random.randrange(TURNS)
        self._refunds = 0
        #: messages that came and wait in no lane yet
        self._coming = 0
        #: since when the driver has room for none (monotonic)
        self._full = float("inf")
        self._lock = make_lock()
        self._wakeup = Wakeup()
        self._more = False
        #: the room that the driver named last, when there was nothing for him, and until when that need not be looked
        #: at again (monotonic)
        self._told, self._told_until = -1, 0.0
        self._ringing = False
        self._outage = Outage(engine.link, engine.settings)
        self._pull = Pull(engine, self.lanes, self.order, self._wakeup.set)
        self._choice = Choice(engine, self)
        self._intake = Intake(engine, self)
        engine.consumption.opened(self)
        try:
            for queue in queues:
                self.add(queue)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ lanes
    def add(self, queue: str) -> None:
        self._check()
        if queue in self.queues:
            return
        self.queues.append(queue)
        try:
            self._engine.consumption.start(queue, self)
            self.add_lanes(queue)
        except BaseException:
            self.discard(queue)
            raise

    def add_lanes(self, queue: str, steps: Sequence[int] | None = None) -> None:
        """Those of the queue's steps that are not there yet. Blocks."""
        engine = self._engine
        transient = engine.queues.is_transient(queue)
        if steps is None:
            steps = [0] if transient else engine.queues.steps(queue)
        for step in steps:
            if all((lane.queue, lane.step) != (queue, step) for lane in self.lanes):
                lane = Lane(engine, queue, step, durable=not transient)
                lane.open(self._arrived)
                with self._lock:
                    self._pull.changed()
                    self.lanes.append(lane)
                    self._pull.ask()

    def discard(self, queue: str) -> None:
        if queue not in self.queues:
            return
        self.queues.remove(queue)
        self._close_lanes([lane for lane in self.lanes if lane.queue == queue])
        self._engine.consumption.stop([queue], self)

    def _close_lanes(self, lanes: Sequence[Lane]) -> None:
        close_lanes(self._engine, lanes)
        self._engine.settle_in_loop(self._intake.finish)
        with self._lock:
            waiting = [delivery for lane in lanes for delivery in lane.pool]
            for lane in lanes:
                lane.pool.clear()
                self.lanes.remove(lane)
            self._pull.changed()
        self.hand_back(waiting)

    def order(self) -> list[Lane]:
        """Lanes in the order in which they are asked and served: by queue, steps of a queue together."""
        strategy = self._engine.settings.queue_order_strategy
        names = sorted(self.queues) if strategy == "sorted" else list(self.queues)
        if strategy == "round_robin" and names:
            turn = self._turn % len(names)
            names = names[turn:] + names[:turn]
        place = {name: number for number, name in enumerate(names)}
        return sorted(self.lanes, key=lambda lane: (place.get(lane.queue, 0), lane.step))

    # ------------------------------------------------------------------ in the link's thread
    def _arrived(self, lane: Lane, reply: Reply) -> None:
        if reply.status:
            with self._lock:
                self._pull.status(lane, reply)
            return
        with self._lock:
            room = self._pull.arrived(lane)
            self._coming += 1
        self._intake.take(lane, reply, surplus=not room)

    def admit(self, lane: Lane, delivery: Delivery) -> None:
        """It may be handed out."""
        with self._lock:
            self._coming -= 1
            if lane in self.lanes:
                if delivery.place.last:
                    self._choice.suspects = True
                else:
                    self._engine.trials.joined()
                lane.put(delivery)
                if not self._ringing:
                    # the driver gets all that was read at once
                    self._ringing = True
                    self._engine.link.call_next(self._ring)
                return
        self.hand_back([delivery])

    def _ring(self) -> None:
        self._ringing = False
        self._wakeup.set()

    def make_room(self) -> bool:
        """Whether there is room for one more, which is taken."""
        with self._lock:
            if self._pull.want <= 0:
                return False
            self._pull.want -= 1
            self._coming += 1
            return True

    def refund(self) -> None:
        """One that came is none to hand out: there is room for another."""
        with self._lock:
            self._refunds += 1
            self._coming -= 1
            self._pull.want += 1
            self._pull.ask()

    def look(self, now: float) -> None:
        """Now and then, though nobody may drive the consumer."""
        self._told = -1
        with self._lock:
            self._choice.release(now)
            if self._choice.abandoned(now):
                self._pull.want = 0
            if now - self._full > FULL:
                # there was room when they were asked for
                self._pull.want = min(0, self._pull.want)
                self.hand_back(self._choice.leave())
            self._pull.look(now)

    def reconnected(self) -> None:
        with self._lock:
            self._pull.reconnected()
        self._wakeup.set()

    def wake(self) -> None:
        self._wakeup.set()

    # ------------------------------------------------------------------ receiving
    def receive(self, timeout: float, limit: int = 1) -> list[Delivery]:
        deliveries = self._take(limit)
        if deliveries or timeout <= 0:
            return deliveries
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # a close in the midst of a turn has lost its wake
            self._check()
            due = self.due()
            self._wait(left if due is None else min(left, due))
            if deliveries := self._take(limit):
                break
        return deliveries

    def fetch(self, limit: int = 1) -> list[Delivery]:
        self._check()
        got: list[Delivery] = []
        deadline = time.monotonic() + self._engine.settings.socket_timeout
        self._engine.settled(PATIENCE)
        self._pull.single = True
        try:
            looks = 0
            while len(got) < limit and time.monotonic() < deadline:
                before, looks = self._refunds, looks + 1
                got += self._fetch(limit - len(got), deadline)
                if self._refunds > before:
                    continue
                if got or looks > 1:
                    break
                self._wakeup.clear()
                self._wait(NEWS)
        finally:
            self._pull.single = False
        with self._lock:
            # nothing is asked for beyond this call
            self._pull.want = sum(max(0, lane.outstanding) for lane in self.lanes)
        if got and self.no_ack:
            self._engine.acked(PATIENCE)
        return got

    def _fetch(self, limit: int, deadline: float) -> list[Delivery]:
        """Of what came some may be refunded."""
        with self._lock:
            self._pull.want = limit - self._coming - sum(
                len(lane.pool) + max(0, lane.outstanding) for lane in self.lanes)
            sweep = self._pull.begin(arm=False) if self._pull.want > 0 else None
        if sweep is None:
            self._engine.ping()
        while sweep is not None and not sweep.done and time.monotonic() < deadline:
            self._wait(0.2)
        self._engine.settle_in_loop(self._intake.finish)
        return self._take(limit, ask=False)

    def _take(self, limit: int, *, ask: bool = True) -> list[Delivery]:
        self._check()
        engine, now = self._engine, time.monotonic()
        if (limit == self._told and now < self._told_until and not self._wakeup.is_set and not engine.chores
                and not engine.settles.returning):
            engine.acks.send_due(now)
            self._choice.seen(now)
            return []
        self._wakeup.clear()
        if engine.chores:
            engine.chores.do()
        # what was given back comes before what is new
        if engine.settles.returning:
            engine.settled(PATIENCE)
        else:
            engine.acks.send_due(now)
        self._outage.look()
        got: list[Delivery] = []
        with self._lock:
            if limit > 0:
                self._full = float("inf")
                got = self._choice.pick(limit)
            else:
                self._full = min(self._full, time.monotonic())
            if got:
                self._turn = self.queues.index(got[-1].queue) + 1 if got[-1].queue in self.queues else 0
            waiting = sum(len(lane.pool) for lane in self.lanes) + self._coming
            if not got and any(lane.pool for lane in self.lanes):
                # one that may not be handed out yet leaves its room to others
                waiting -= 1
            if limit > 0:
                self._pull.want = limit - len(got) - waiting
            if ask and limit > 0 and not (got and limit == len(got)):
                self._pull.ask()
        if got:
            engine.trials.say()
        if got and self.no_ack:
            engine.acks.send()
        self._more = any(lane.pool for lane in self.lanes) and limit > len(got) and self._choice.due() == 0.0
        if ask and not got and self._choice.due() is None and engine.link.connected:
            self._told, self._told_until = limit, now + AGAIN
        else:
            self._told = -1
        return got

    def sources(self) -> Sequence[int]:
        return [self._wakeup.fileno()]

    def due(self) -> float | None:
        if self._more:
            return 0.0
        return min((when for when in (self._choice.due(), self._outage.due()) if when is not None), default=None)

    def _wait(self, timeout: float) -> None:
        wait_readable([self._wakeup.fileno()], timeout)

    # ------------------------------------------------------------------ end
    def close(self, keep: Collection[Delivery] = ()) -> None:
        if self.closed:
            return
        self.closed = True
        self._wakeup.set()
        if self._engine.forked():
            return
        with self._lock:
            self._pull.want = 0
        if self._engine.link.connected:
            try:
                # one that is silent is cut off: nothing that follows waits for it
                self._engine.link.flush(FAREWELL)
            except StoreConnectionError as error:
                logger.debug("closing: %s", error)
        self._close_lanes(list(self.lanes))
        kept = {id(delivery) for delivery in keep}
        for delivery in self._engine.holder.of(self):
            if id(delivery) not in kept:
                self._settle(delivery, "back")
        self._engine.acks.send()
        self._engine.settles.finish(FAREWELL, LONGEST)
        self._engine.consumption.stop(self.queues, self)
        self._engine.consumption.closed(self)
        self._wakeup.close()

    def _check(self) -> None:
        if self.closed or self._engine.closed:
            raise Closed("the consumer is closed, or belongs to the parent process of a fork")

    def after_fork(self) -> None:
        self.closed = True
