"""Receiving on two connections: `io` carries settlements and takes, `waiter` waits on the bells while nothing is ready.

A wait is one write, BLPOP and a take behind it: the server runs the take in the moment it is woken, so a message is in
hand after one trip, and nothing is ever handed to a connection that only waits. Nothing here blocks but `receive` with
a time-out, `fetch` and `close`.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Closed, StoreConnectionError
from ...message import Delivery
from ...real import Wakeup
from .link import DEMOTED, UNAVAILABLE, Link
from .resp import ReplyError, pack
from .scripts import script
from .settles import Outbox, Settle
from .takes import TakePlan, to_deliveries

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)

#: pauses between tries to connect again, the last one again and again
PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0)
#: how long an answer may be late before its link counts as dead
PATIENCE = 5.0
#: how often an idle consumer looks for handed-back messages without their mark
LOOK_EVERY = 5.0


class RedisConsumer:
    """See `streambroker.engine.Consumer`."""

    def __init__(self, engine: RedisStreamsEngine, queues: Sequence[str], no_ack: bool) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._no_ack = no_ack
        self.plan = TakePlan(engine, no_ack)
        self._io, self._waiter = engine.make_link(), engine.make_link()
        self._expected: deque[tuple[str, Any, float]] = deque()
        self._waiting: deque[tuple[str, Any, float]] = deque()
        self._outstanding = 0
        self._armed = 0
        self._inbox: deque[Delivery] = deque()
        self._more = False
        self._idle = False
        self._next_due: float | None = None
        self._next_look = 0.0
        self._down_since: float | None = None
        self._tries = 0
        self._retry_at = 0.0
        self._quiet_until = 0.0
        self._closed = False
        self._wakeup: Wakeup | None = None
        self._parked = False
        self._owner = 0
        #: monotonic time of the last call that drove this consumer
        self.driven = 0.0
        self.outbox = Outbox()
        #: what was received or waits to be received, unsettled
        self.held: dict[tuple[str, str], Delivery] = {}
        engine.consumer_opened(self)
        for queue in queues:
            self.add(queue)

    # ------------------------------------------------------------------ queues
    @property
    def queues(self) -> list[str]:
        return self.plan.queues

    @property
    def no_ack(self) -> bool:
        return self._no_ack

    @property
    def closed(self) -> bool:
        return self._closed

    def add(self, queue: str) -> None:
        self._check()
        if queue not in self.plan.queues:
            self._engine.start_consuming(queue, self)
            self._disarm()
            self.plan.add(queue)
            self._idle = False

    def discard(self, queue: str) -> None:
        if queue in self.plan.queues:
            self._disarm()
            self.plan.discard(queue)
            self.hand_back([delivery for delivery in self._inbox if delivery.queue == queue])
            self._inbox = deque(delivery for delivery in self._inbox if delivery.queue != queue)
            self._engine.stop_consuming(queue, self)

    # ------------------------------------------------------------------ receiving
    def receive(self, timeout: float, limit: int = 1) -> list[Delivery]:
        deliveries = self._turn(limit)
        if deliveries or timeout <= 0:
            return deliveries
        deadline = time.monotonic() + timeout
        if self._wakeup is None:
            self._wakeup = Wakeup()
        while (left := deadline - time.monotonic()) > 0:
            due = self.due()
            self._parked = True
            try:
                if not self.outbox.due(time.monotonic()) == 0.0:
                    self._select(left if due is None else min(left, due))
            finally:
                self._parked = False
            if deliveries := self._turn(limit):
                return deliveries
        return []

    def fetch(self, limit: int = 1) -> list[Delivery]:
        self._check()
        if limit <= 0:
            return []
        self._disarm()
        deadline = time.monotonic() + self._settings.socket_timeout
        self._idle = asked = False
        while True:
            deliveries = self._turn(limit, arm=False, take=not asked)
            asked = asked or self._outstanding > 0
            if deliveries or asked and not self._outstanding or time.monotonic() >= deadline:
                return deliveries
            self._wait_io(0.05)

    def sources(self) -> Sequence[int]:
        fds = [link.fileno() for link in (self._io, self._waiter) if link.is_open]
        if self._wakeup is not None:
            fds.append(self._wakeup.fileno())
        return fds

    def due(self) -> float | None:
        now = time.monotonic()
        times = []
        if self._more:
            return 0.0
        if not self._io.is_open:
            times.append(max(0.0, self._retry_at - now))
        elif self._quiet_until > now:
            times.append(self._quiet_until - now)
        else:
            held = self.outbox.due(now)
            if held is not None:
                times.append(held)
        if self._expected:
            times.append(max(0.0, self._expected[0][2] - now))
        if self._waiting:
            times.append(max(0.0, self._waiting[0][2] - now))
        return min(times) if times else None

    def _wait_io(self, timeout: float) -> None:
        if not self._io.is_open:
            time.sleep(0.01)
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self._io.fileno(), selectors.EVENT_READ)
            selector.select(timeout)

    def _select(self, timeout: float) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in self.sources():
                selector.register(fd, selectors.EVENT_READ)
            selector.select(max(0.0, timeout))
        if self._wakeup is not None:
            self._wakeup.clear()

    def _turn(self, limit: int, arm: bool = True, take: bool = True) -> list[Delivery]:
        """Read what arrived, send what is due, hand out."""
        self._check()
        now = time.monotonic()
        self._owner = threading.get_ident()
        self._pump(now)
        self.driven = now
        if not self._io.is_open and now >= self._retry_at:
            self._reopen(now)
        if self._io.is_open and now >= self._quiet_until:
            self._send(now, limit, arm, take)
        if not self._inbox or limit <= 0:
            self._more = False
            return []
        deliveries = [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]
        self._more = bool(self._inbox)
        return deliveries

    def _pump(self, now: float) -> None:
        if self._expected and self._io.is_open:
            try:
                for reply in self._io.poll():
                    kind, what, _ = self._expected.popleft()
                    self._answered(kind, what, reply)
                if self._expected and now >= self._expected[0][2]:
                    raise StoreConnectionError("no answer in time")
            except StoreConnectionError as error:
                self._broken(self._io, error)
        if self._waiting and self._waiter.is_open:
            try:
                for reply in self._waiter.poll():
                    kind, what, _ = self._waiting.popleft()
                    if kind == "take":
                        self._armed = 0
                        self._took(*what, reply)
                    elif isinstance(reply, ReplyError):
                        self._refused(reply)
                if self._waiting and now >= self._waiting[0][2]:
                    raise StoreConnectionError("no answer in time")
            except StoreConnectionError as error:
                self._broken(self._waiter, error)

    def _answered(self, kind: str, what: Any, reply: Any) -> None:
        if kind == "take":
            self._outstanding -= what[0]
            self._took(*what, reply)
        elif kind == "settle":
            if isinstance(reply, ReplyError):
                self.outbox.give_back(what)
                self._refused(reply)
                return
            self._engine.holder.settled(what)
            if isinstance(reply, list) and reply[1]:
                self._engine.buried(what[0].queue)
        elif isinstance(reply, ReplyError):
            self._refused(reply)

    def _took(self, asked: int, queues: list[str], reply: Any) -> None:
        if isinstance(reply, ReplyError):
            self._refused(reply)
            return
        due_ms = int(reply[0])
        now = time.monotonic()
        self._next_due = None if due_ms < 0 else now + due_ms / 1000
        if self._next_due is not None:
            self._engine.expect_due(self.plan.queues, self._next_due)
        self._idle = len(reply) - 1 < asked
        self._inbox.extend(to_deliveries(self._engine, self, queues, reply))

    def _send(self, now: float, limit: int, arm: bool = True, take: bool = True, flush: bool = False) -> None:
        room = limit - len(self._inbox) - self._outstanding - self._armed
        # half of the prefetch is asked for at once: the other half keeps the worker busy during the trip
        ask = take and not self._idle and not self._outstanding and bool(self.plan.queues) and room > 0 \
            and room >= min(len(self.held), limit)
        late = now + self._settings.socket_timeout
        parts: list[bytes] = []
        settle_due = self.outbox.due(now)
        if settle_due is not None and (flush or ask or settle_due <= 0):
            for data, settles in self._engine.packer.pack(self.outbox.take()):
                parts.append(data)
                self._expected.append(("settle", settles, late))
        for data in self.plan.refresh(now):
            parts.append(data)
            self._expected.append(("refresh", None, late))
        if ask:
            data, queues = self._take(now, room)
            parts.append(data)
            self._expected.append(("take", (room, queues), late))
            self._outstanding += room
        try:
            if parts:
                self._io.send(b"".join(parts))
        except StoreConnectionError as error:
            self._broken(self._io, error)
            return
        if arm and self._idle and not self._armed and not self._outstanding and room > 0 and self.plan.queues:
            try:
                self._arm(now, room)
            except StoreConnectionError as error:
                self._broken(self._waiter, error)
                self._quiet_until = time.monotonic() + 0.2

    def _take(self, now: float, count: int) -> tuple[bytes, list[str]]:
        look = now >= self._next_look
        if look:
            self._next_look = now + LOOK_EVERY
        return self.plan.take(count, look)

    def _arm(self, now: float, room: int) -> None:
        if not self._waiter.is_open:
            self._waiter.open()
            self._waiting.clear()
        block = self._settings.block_timeout
        if self._next_due is not None:
            block = min(block, max(0.001, self._next_due - now))
        deadline = now + block + PATIENCE
        take, queues = self._take(now, room)
        self._armed = room
        self._waiting.append(("bell", None, deadline))
        self._waiting.append(("take", (room, queues), deadline))
        self._waiter.send(pack("BLPOP", *self.plan.bells, f"{block:.3f}") + take)

    # ------------------------------------------------------------------ trouble
    def _refused(self, reply: ReplyError) -> None:
        text = str(reply)
        word = text.split(" ", 1)[0]
        if word == "NOSCRIPT":
            now = time.monotonic()
            for name in ("take", "done", "settle", "declare"):
                self._expected.append(("load", None, now + self._settings.socket_timeout))
                self._io.send(script(name).load)
            self._idle = False
            return
        self._engine.report(f"the store refuses to work for consumers: {text}")
        self._quiet_until = time.monotonic() + 0.5
        self._idle = False
        if word in DEMOTED:
            raise StoreConnectionError(text)
        if word not in UNAVAILABLE:
            logger.debug("unexpected refusal: %s", text)

    def _broken(self, link: Link, error: StoreConnectionError) -> None:
        """Forget what was under way: settlements are sent again, taken messages that did not arrive are found by the
        keeper."""
        now = time.monotonic()
        if self._armed or self._outstanding:
            self._engine.doubt(self.plan.queues)
        self._waiter.close()
        self._waiting.clear()
        self._armed = 0
        if link is self._io or not self._io.is_open:
            self._io.close()
            lost = [settle for kind, what, _ in self._expected if kind == "settle" for settle in what]
            self._expected.clear()
            self._outstanding = 0
            self.outbox.give_back(lost)
            if self._down_since is None:
                self._down_since = now
                logger.debug("consumer's link broke: %s", error)
        self._idle = False

    def _reopen(self, now: float) -> None:
        try:
            self._io.open()
        except StoreConnectionError as error:
            if self._down_since is None:
                self._down_since = now
            self._retry_at = time.monotonic() + PAUSES[min(self._tries, len(PAUSES) - 1)]
            self._tries += 1
            if now - self._down_since >= self._settings.reconnect_timeout:
                self._down_since, self._tries = None, 0
                raise StoreConnectionError(f"the store cannot be reached: {error}") from error
            return
        if self._tries:
            self._engine.report("connected again", calm=True)
        self._down_since, self._tries = None, 0
        self._expected.clear()
        self._outstanding = 0

    def _disarm(self) -> None:
        """Stop waiting. A take that the server ran in that moment is found by the keeper."""
        if self._armed:
            self._waiter.close()
            self._waiting.clear()
            self._armed = 0
            self._idle = False
            self._engine.doubt(self.plan.queues)

    # ------------------------------------------------------------------ settling
    def ack(self, delivery: Delivery) -> None:
        self._settle("done", delivery)

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        self._settle("later" if delay > 0 else "nack", delivery, f"{delay * 1000:.0f}")

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        for delivery in deliveries:
            self._settle("back", delivery)

    def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._settle("dead", delivery, reason)

    def _settle(self, mode: str, delivery: Delivery, extra: str = "") -> None:
        if delivery.settled or self._no_ack or self._engine.forked(self):
            return
        delivery.settled = True
        self.held.pop((delivery.queue, delivery.id), None)
        if delivery.lost and mode != "done":
            logger.debug("lease of %s in %s was lost: %s does nothing", delivery.id, delivery.queue, mode)
            return
        self._engine.holder.settling(delivery)
        self.outbox.put(Settle(mode, delivery.queue, delivery.id, self._engine.holder.name, extra))
        if self._closed:
            self._engine.flush_settles(at_once=True)
        elif self._parked and self._wakeup is not None:
            self._wakeup.set()
        elif mode != "done" and self._owner == threading.get_ident() and self._io.is_open:
            self._send(time.monotonic(), 0, arm=False, take=False)
        else:
            self._engine.flush_settles(at_once=False)

    # ------------------------------------------------------------------ end
    def close(self, keep: Collection[Delivery] = ()) -> None:
        if self._closed or self._engine.forked(self):
            self._closed = True
            return
        self._closed = True
        if self._parked and self._wakeup is not None:
            # someone waits in `receive`: it ends with Closed, then the connections are ours
            self._wakeup.set()
            deadline = time.monotonic() + 1.0
            while self._parked and time.monotonic() < deadline:
                time.sleep(0.001)
        self._disarm()
        queues = self.plan.queues
        if self._outstanding and self._io.is_open:
            self._last_replies()
        kept = {id(delivery) for delivery in keep}
        self.hand_back([delivery for delivery in list(self.held.values()) if id(delivery) not in kept])
        self._inbox.clear()
        for queue in list(queues):
            self._engine.stop_consuming(queue, self)
        try:
            if self._io.is_open:
                self._flush_now()
        except StoreConnectionError as error:
            self._broken(self._io, error)
        self._waiter.close()
        self._io.close()
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None
        self._engine.consumer_closed(self)

    def _last_replies(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._outstanding and self._io.is_open and time.monotonic() < deadline:
            self._pump(time.monotonic())
            if self._outstanding:
                self._wait_io(0.05)

    def _flush_now(self) -> None:
        """Send what is left and wait for the answers, since nobody drives this consumer any more."""
        self._send(time.monotonic(), 0, arm=False, take=False, flush=True)
        deadline = time.monotonic() + 2.0
        while self._expected and self._io.is_open and time.monotonic() < deadline:
            self._pump(time.monotonic())
            if self._expected:
                self._wait_io(0.05)
        lost = [settle for kind, what, _ in self._expected if kind == "settle" for settle in what]
        self._expected.clear()
        self.outbox.give_back(lost)

    def _check(self) -> None:
        if self._closed:
            raise Closed("the consumer is closed")
        if self._engine.forked(self):
            raise Closed("this consumer belongs to the parent process; make a new one after the fork")

    def after_fork(self) -> None:
        self._io.abandon()
        self._waiter.abandon()
        self._closed = True
