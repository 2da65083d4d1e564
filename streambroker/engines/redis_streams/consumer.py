"""Receiving and settling."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...errors import Closed
from ...message import Delivery, Message, printable
from ...readable import wait_readable
from ...real import Wakeup
from .publisher import encode
from .settles import Outbox, Settle
from .takes import TakePlan

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

logger = logging.getLogger(__name__)

#: how long `close` waits for answers
FAREWELL = 2.0


class RedisConsumer:
    """See `streambroker.engine.Consumer`."""

    def __init__(self, engine: RedisStreamsEngine, queues: Sequence[str], no_ack: bool) -> None:
        self._engine = engine
        self.no_ack = no_ack
        self.closed = False
        self.plan = TakePlan(engine, no_ack)
        self.outbox = Outbox()
        #: what was received or waits to be received, unsettled
        self.held: dict[tuple[str, str], Delivery] = {}
        #: monotonic time when all that had arrived was read last
        self.driven = 0.0
        self._pull = engine.connections.pull(engine, self)
        self._more = False
        self._wakeup: Wakeup | None = None
        self._parked = False
        self._driver = 0
        engine.consumer_opened(self)
        for queue in queues:
            self.add(queue)

    @property
    def queues(self) -> list[str]:
        return self.plan.queues

    def add(self, queue: str) -> None:
        self._check()
        if queue not in self.plan.queues:
            self._engine.start_consuming(queue, self)
            self._pull.disarm()
            self.plan.add(queue)
            self._pull.ask_again()

    def discard(self, queue: str) -> None:
        if queue in self.plan.queues:
            self._pull.disarm()
            self.plan.discard(queue)
            inbox = self._pull.inbox
            for delivery in [delivery for delivery in inbox if delivery.queue == queue]:
                inbox.remove(delivery)
                self.hand_back([delivery])
            self._engine.stop_consuming([queue], self)

    @property
    def waits(self) -> bool:
        """Whether an answer may have arrived that was not read yet."""
        return not self.closed and self._pull.waits

    # ------------------------------------------------------------------ receiving
    def receive(self, timeout: float, limit: int = 1) -> list[Delivery]:
        deliveries = self._turn(limit)
        if deliveries or timeout <= 0:
            return deliveries
        deadline = time.monotonic() + timeout
        if self._wakeup is None:
            self._wakeup = Wakeup()
        while (left := deadline - time.monotonic()) > 0:
            self._parked = True
            try:
                due = self.due()
                if due != 0.0:
                    readable = wait_readable(self.sources(), left if due is None else min(left, due))
                    if self._wakeup.fileno() in readable:
                        self._wakeup.clear()
            finally:
                self._parked = False
            # who waits here gets what came before the next wait is begun: he comes again
            if deliveries := self._turn(limit, arm=False) or self._turn(limit):
                return deliveries
        return []

    def fetch(self, limit: int = 1) -> list[Delivery]:
        self._check()
        if limit <= 0:
            return []
        self._pull.disarm()
        self._pull.ask_again()
        deadline = time.monotonic() + self._engine.settings.socket_timeout
        asked = False
        while True:
            deliveries = self._turn(limit, arm=False, take=not asked)
            asked = asked or self._pull.outstanding > 0 and not self._pull.left_to_ask
            if deliveries or asked and not self._pull.outstanding or time.monotonic() >= deadline:
                return deliveries
            self._wait_for_answers(0.05)

    def _turn(self, limit: int, *, arm: bool = True, take: bool = True) -> list[Delivery]:
        self._check()
        now = time.monotonic()
        self._driver = threading.get_ident()
        self._pull.turn(now, limit, arm=arm, take=take)
        self.driven = now
        if self._engine.chores:
            self._engine.chores.do()
        inbox = self._pull.inbox
        if not inbox or limit <= 0:
            self._more = False
            return []
        deliveries = [inbox.popleft() for _ in range(min(limit, len(inbox)))]
        self._more = bool(inbox)
        return deliveries

    def sources(self) -> Sequence[int]:
        fds = self._pull.sources()
        if self._wakeup is not None:
            fds.append(self._wakeup.fileno())
        return fds

    def due(self) -> float | None:
        return 0.0 if self._more else self._pull.due(time.monotonic())

    def _wait_for_answers(self, timeout: float) -> None:
        if self._pull.is_open:
            wait_readable(self._pull.answer_sources(), timeout)
        else:
            time.sleep(0.01)

    # ------------------------------------------------------------------ settling
    def ack(self, delivery: Delivery) -> None:
        self._settle("done", delivery)

    def ack_now(self, delivery: Delivery) -> None:
        if delivery.settled or self.no_ack or self._engine.forked():
            return
        holder = self._engine.holder
        holder.settling(delivery)
        try:
            self._engine.awaited.settle(Settle("done", delivery.queue, delivery.id, holder.name))
        except BaseException:
            holder.settling_failed(delivery)
            raise
        delivery.settled = True
        self.held.pop((delivery.queue, delivery.id), None)

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        self._settle("later" if delay > 0 else "nack", delivery, f"{delay * 1000:.0f}")

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        for delivery in deliveries:
            self._settle("back", delivery)

    def dead_letter(self, delivery: Delivery, reason: str, message: Message | None = None) -> None:
        self._settle("dead", delivery, printable(reason), encode(message) if message is not None else b"")

    def _settle(self, mode: str, delivery: Delivery, extra: str = "", copy: bytes = b"") -> None:
        if delivery.settled or self.no_ack or self._engine.forked():
            return
        delivery.settled = True
        self.held.pop((delivery.queue, delivery.id), None)
        if delivery.lost and mode != "done":
            logger.debug("lease of %s in %s was lost: %s does nothing", delivery.id, delivery.queue, mode)
            return
        self._engine.holder.settling(delivery)
        news = self.outbox.put(Settle(mode, delivery.queue, delivery.id, self._engine.holder.name, extra, copy))
        if self.closed:
            self._engine.flush_settles(at_once=True)
        elif self._parked and self._wakeup is not None:
            if news:
                self._wakeup.set()
        elif mode != "done" and self._driver == threading.get_ident() and self._pull.is_open:
            self._pull.send(time.monotonic(), 0, arm=False, take=False)
        else:
            self._engine.flush_settles(at_once=False)

    # ------------------------------------------------------------------ end
    def close(self, keep: Collection[Delivery] = ()) -> None:
        if self.closed:
            return
        self.closed = True
        if self._engine.forked():
            return
        if self._parked and self._wakeup is not None:
            # someone waits in `receive`: it ends with Closed, then the connections are ours
            self._wakeup.set()
            deadline = time.monotonic() + 1.0
            while self._parked and time.monotonic() < deadline:
                time.sleep(0.001)
        self._pull.disarm()
        deadline = time.monotonic() + FAREWELL
        self._await_answers(deadline)
        kept = {id(delivery) for delivery in keep}
        for delivery in list(self.held.values()):
            if id(delivery) not in kept:
                self._settle("back", delivery)
        self._pull.inbox.clear()
        if self._pull.is_open:
            self._pull.send(time.monotonic(), 0, arm=False, take=False, flush=True)
            self._await_answers(deadline)
        self._engine.stop_consuming(self.plan.queues, self)
        self._pull.close()
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None
        self._engine.consumer_closed(self)

    def _await_answers(self, deadline: float) -> None:
        while self._pull.unanswered and time.monotonic() < deadline:
            self._pull.pump(time.monotonic())
            if self._pull.unanswered:
                self._wait_for_answers(0.05)

    def _check(self) -> None:
        if self.closed:
            raise Closed("the consumer is closed, or belongs to the parent process of a fork")

    def after_fork(self) -> None:
        self._pull.abandon()
        self.closed = True
