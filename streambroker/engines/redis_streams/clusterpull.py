"""Asking a cluster for messages. Settlements and takes of a node's queues share a connection to it; each queue has one
more, that waits on its bell while it has nothing ready: keys of two queues cannot be in one command.

A wait brings no message. When a bell has rung its queue is asked for as many as there is room for then, and when the
other queues have taken the room it rings on for another consumer. Queues are asked one after the other, in their order,
so that never more is taken than there is room for. A message on its last allowed delivery is kept apart from others of
its queue alone; what its holder has of other queues is heard of when the holder is reclaimed.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ...errors import StoreConnectionError
from ...message import Delivery
from .cluster import ASK_MAP, SLOW, Cluster, Node, slot_of
from .lanes import CONNECT, Batch, Lane, Lanes, Place
from .link import DEMOTED
from .pipe import Expected
from .pull import LOOK_EVERY, REST
from .resp import ReplyError, pack
from .router import key_of
from .scripts import script
from .takes import to_deliveries

if TYPE_CHECKING:
    from .consumer import RedisConsumer
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)

#: refusals that come and go while slots and masters change
_PASSING = frozenset({"ASK", "TRYAGAIN", "UNBLOCKED"})
#: how often (seconds) a consumer that waits asks who serves what, and how long for an answer
WATCH, SILENCE = 5.0, 3.0
_SCRIPTS = ("take", "done", "settle", "declare", "ring")


class ClusterPull:
    """The receiving half of a consumer, as `Pull`. Driven by one thread or greenlet at a time."""

    def __init__(self, engine: RedisStreamsEngine, cluster: Cluster, consumer: RedisConsumer) -> None:
        self._engine = engine
        self._cluster = cluster
        self._settings = engine.settings
        self._consumer = consumer
        self._plan = consumer.plan
        self._outbox = consumer.outbox
        self._lanes = Lanes(cluster, engine.settings.reconnect_timeout, engine.chores)
        self._places: dict[str, Place] = {}
        self.inbox: deque[Delivery] = deque()
        #: messages that the answer under way may bring
        self.outstanding = 0
        #: queues whose bell must ring on
        self._ring_on: set[str] = set()
        self._rest_until = 0.0
        #: when to see what keeps the answer under way
        self._see_at = 0.0
        self._map_at = 0.0

    # ------------------------------------------------------------------ one turn
    def turn(self, now: float, limit: int, *, arm: bool = True, take: bool = True) -> None:
        """Read what arrived, send what is due. Raises StoreConnectionError when no node of a queue could be reached for
        `reconnect_timeout`; while some can be, their queues are served."""
        self.pump(now)
        if self.outstanding and now >= self._see_at:
            self._see_who_is_gone(now)
        self._follow_plan()
        self._lanes.connect({place.slot for place in self._places.values()}, now)
        self._wait_elsewhere()
        self.send(now, limit, arm=arm, take=take)

    def pump(self, now: float) -> None:
        for lane in self._lanes.all():
            try:
                for expected, reply in lane.pipe.poll(now):
                    self._answered(expected, reply, lane.node)
            except StoreConnectionError as error:
                self._broken(lane, error)
        for place in [*self._places.values()]:
            if place.waiter is not None:
                try:
                    for expected, reply in place.waiter.poll(now):
                        self._answered(expected, reply, expected.about[1])
                except StoreConnectionError as error:
                    logger.debug("the wait for queue %s broke: %s", place.queue, error)
                    place.stop_waiting()
                    place.idle = False

    def _follow_plan(self) -> None:
        if [*self._places] != self._plan.queues:
            bells = dict(zip(self._plan.queues, self._plan.bells, strict=True))
            for queue in self._places.keys() - bells.keys():
                self._drop(self._places.pop(queue))
            self._places = {queue: self._places.get(queue) or Place(queue, bell) for queue, bell in bells.items()}

    def send(self, now: float, limit: int, *, arm: bool, take: bool, flush: bool = False) -> None:
        """Settlements that are due (with `flush` all), and a take for the free places of one queue."""
        room = limit - len(self.inbox) - self.outstanding
        batch = Batch(self._lanes, now, now + self._settings.socket_timeout)
        ask = take and room > 0 and not self.outstanding and any(
            not place.idle and now >= place.rest_until for place in self._places.values())
        settle_due = self._outbox.due(now)
        if settle_due is not None and (flush or now >= self._rest_until and (ask or settle_due <= 0)):
            for data, settles in self._engine.packer.pack(self._outbox.take()):
                if not batch.add(slot_of(self._engine.keys.root(settles[0].queue)), data, "settle", settles):
                    self._outbox.give_back(settles)
                    self._rest_until = now + REST / 2
        if take and room <= 0 and not self.outstanding:
            self._ring_on |= {place.queue for place in self._places.values() if place.rung}
        for queue in [*self._ring_on] if flush or now >= self._rest_until else ():
            if batch.add(slot_of(self._engine.keys.root(queue)), self._ring(queue), "ring", queue):
                self._ring_on.discard(queue)
                if queue in self._places:
                    self._places[queue].rung = False
            else:
                self._rest_until = now + REST / 2
        for data in self._plan.refresh(now):
            batch.add(slot_of(key_of(data)), data, "refresh", data)
        if ask:
            self._ask(now, room, batch)
        if arm and now >= self._map_at and self._lanes.open() and any(place.armed for place in self._places.values()):
            # a machine that died never ends the waits there
            self._map_at = now + WATCH
            batch.add_to(random.choice(self._lanes.open()), pack(*ASK_MAP), Expected("map", None, now + SILENCE))
        for lane, error in batch.send():
            self._broken(lane, error)
        if arm and room > 0 and not self.outstanding:
            for place in self._places.values():
                if place.idle and not place.armed and now >= place.rest_until:
                    self._arm(place, now)

    def _ring(self, queue: str, holder: str = "") -> bytes:
        return script("ring").call(self._engine.keys.whole(queue), holder, *self._engine.steps)

    def _ask(self, now: float, room: int, batch: Batch) -> None:
        """A take of the next queue that is worth asking."""
        for queue in self._plan.order():
            place = self._places.get(queue)
            if place is None or place.idle or now < place.rest_until:
                continue
            look = now >= place.next_look
            if batch.add(place.slot, self._plan.take_from(queue, room, look), "take", (room, place)):
                if look:
                    place.next_look = now + LOOK_EVERY
                place.asked, place.rung = True, False
                self.outstanding = room
                self._see_at = now + SLOW
                return

    def _arm(self, place: Place, now: float) -> None:
        block = self._settings.block_timeout
        if place.next_due is not None:
            block = min(block, max(0.001, place.next_due - now))
        try:
            # a process that stands still and was declared dead must not keep what the bell rang for to itself
            place.wait(self._cluster, now, block, self._ring(place.queue, self._engine.holder.name))
        except StoreConnectionError as error:
            logger.debug("no wait for queue %s: %s", place.queue, error)
            place.stop_waiting()
            place.idle, place.rest_until = False, time.monotonic() + REST / 2

    # ------------------------------------------------------------------ answers
    def _answered(self, expected: Expected, reply: Any, node: Node) -> None:
        kind, about = expected.kind, expected.about
        place: Place | None = None
        if kind == "take":
            room, place = about
            self.outstanding = 0
            if not isinstance(reply, ReplyError):
                self._took(place, room, reply)
        elif kind == "bell":
            place = about[0]
            place.idle, place.rung = False, isinstance(reply, list)
        elif kind == "passed":
            place = about[0]
        elif kind == "map" and not isinstance(reply, ReplyError):
            self._cluster.learn(reply, node)
        elif kind == "ring" and isinstance(reply, ReplyError):
            self._ring_on.add(about)
        elif kind == "settle":
            if isinstance(reply, ReplyError):
                self._outbox.give_back(about)
            else:
                self._engine.settled(about, reply)
        if isinstance(reply, ReplyError):
            self._refused(reply, node, place)

    def _took(self, place: Place, room: int, reply: list[Any]) -> None:
        due_ms = int(reply[0])
        place.next_due = None if due_ms < 0 else time.monotonic() + due_ms / 1000
        if place.next_due is not None:
            self._engine.expect_due([place.queue], place.next_due)
        place.idle = len(reply) - 1 < room
        self.inbox.extend(to_deliveries(self._engine, self._consumer, [place.queue], reply))

    # ------------------------------------------------------------------ trouble
    def _refused(self, reply: ReplyError, node: Node, place: Place | None) -> None:
        word = str(reply).split(" ", 1)[0]
        now = time.monotonic()
        if place is not None:
            place.idle = False
        if word == "NOSCRIPT":
            self._load(self._lanes.to(node), now)
            return
        if place is not None and word in DEMOTED:
            place.stop_waiting()
        if word == "MOVED":
            self._cluster.moved(reply, node)
            return
        # the rest of a slot that moves, or a new master, comes soon
        if place is not None:
            place.rest_until = now + REST
        else:
            self._rest_until = now + REST
        if word not in _PASSING:
            self._engine.chores.report(f"node {node} of the cluster refuses to work for consumers: {reply}")
        if word in DEMOTED:
            try:
                self._cluster.renew(CONNECT)
            except StoreConnectionError as error:
                logger.debug("no new map of the cluster: %s", error)

    def _load(self, lane: Lane, now: float) -> None:
        loads = [script(name).load for name in _SCRIPTS]
        late = now + self._settings.socket_timeout
        try:
            lane.pipe.send(loads, [Expected("load", None, late) for _ in loads])
        except StoreConnectionError as error:
            self._broken(lane, error)

    def _broken(self, lane: Lane, error: StoreConnectionError) -> None:
        """Forget what was under way: settlements are sent again, taken messages that did not arrive are found by the
        keeper."""
        pipe = lane.pipe
        pipe.close()
        for settles in reversed(pipe.abandoned("settle")):
            self._outbox.give_back(settles)
        self._ring_on |= {*pipe.abandoned("ring")}
        for _, place in pipe.abandoned("take"):
            self.outstanding = 0
            place.idle = False
            self._engine.doubt([place.queue])
        pipe.forget()
        lane.failed()
        logger.debug("a consumer's link to %s broke: %s", lane.node, error)

    def _see_who_is_gone(self, now: float) -> None:
        """A machine that died says nothing, and what it was asked holds up all queues."""
        self._see_at = now + SLOW
        for lane in self._lanes.open():
            if self._cluster.is_replaced(lane.node, CONNECT):
                self._broken(lane, StoreConnectionError("others have its slots"))

    def _wait_elsewhere(self) -> None:
        for place in self._places.values():
            if place.armed and not self._cluster.serves(place.node, place.slot):
                place.stop_waiting()
                place.idle = False

    def _drop(self, place: Place) -> None:
        place.stop_waiting()
        if place.rung:
            self._ring_on.add(place.queue)

    def disarm(self) -> None:
        """Stop waiting."""
        self.pump(time.monotonic())
        for place in self._places.values():
            self._drop(place)
            place.idle = False

    def ask_again(self) -> None:
        """The queues have changed, or someone wants to know now."""
        self._follow_plan()
        for place in self._places.values():
            place.idle = place.asked = False

    # ------------------------------------------------------------------ waiting and ending
    @property
    def left_to_ask(self) -> bool:
        """Whether some queues were not asked since `ask_again`."""
        return not all(place.asked for place in self._places.values())

    @property
    def is_open(self) -> bool:
        return any(lane.pipe.is_open for lane in self._lanes.all())

    def sources(self) -> list[int]:
        waiters = [place.waiter.fileno() for place in self._places.values() if place.armed and place.waiter is not None]
        return [*self.answer_sources(), *waiters]

    def answer_sources(self) -> list[int]:
        """Where answers to what was asked come, but for waits."""
        return [lane.pipe.fileno() for lane in self._lanes.all() if lane.pipe.is_open]

    def due(self, now: float) -> float | None:
        times = self._lanes.due(now)
        if self.outstanding:
            times.append(max(0.0, self._see_at - now))
        elif self._lanes.open() and any(place.armed for place in self._places.values()):
            times.append(max(0.0, self._map_at - now))
        if self._plan.queues and not self._places:
            times.append(0.0)
        times += [place.waiter.due(now) for place in self._places.values() if place.waiter is not None]
        times += [place.rest_until - now for place in self._places.values() if place.rest_until > now]
        settle_due = 0.0 if self._ring_on else self._outbox.due(now)
        if settle_due is not None:
            times.append(max(settle_due, self._rest_until - now))
        return min((when for when in times if when is not None), default=None)

    @property
    def waits(self) -> bool:
        """Whether messages may be under way."""
        return self.outstanding > 0

    @property
    def unanswered(self) -> bool:
        return any(lane.pipe.is_open and not lane.pipe.quiet for lane in self._lanes.all())

    def close(self) -> None:
        """What was not answered goes back to the outbox."""
        for lane in self._lanes.all():
            for settles in reversed(lane.pipe.abandoned("settle")):
                self._outbox.give_back(settles)
            lane.pipe.close()
            lane.pipe.forget()
        for place in self._places.values():
            place.stop_waiting()

    def abandon(self) -> None:
        for lane in self._lanes.all():
            lane.pipe.abandon()
        for place in self._places.values():
            if place.waiter is not None:
                place.waiter.abandon()
