"""The settling half of a consumer: free of its connection, from any thread, also when it is closed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from ...message import Delivery, Message, printable
from .settles import Settle

if TYPE_CHECKING:
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)

#: room that a dead letter needs beside its message (bytes)
GRAVE_HEADERS = 4096


class Settling:
    """See `streambroker.engine.Consumer`."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine

    def ack(self, delivery: Delivery) -> None:
        if self._settling(delivery):
            self._engine.holder.drop(delivery)
            self._engine.claims.acked(delivery.place)
            self._engine.acks.put(delivery.place.reply)
            self._close_book(delivery)

    def ack_now(self, delivery: Delivery) -> None:
        if delivery.settled or self._engine.forked():
            return
        if delivery.place.overdue:
            self.ack(delivery)
            return
        self._engine.acks.confirm(delivery.place.reply)
        if self._settling(delivery):
            self._engine.holder.drop(delivery)
            self._engine.claims.acked(delivery.place)
            self._close_book(delivery)

    def _close_book(self, delivery: Delivery) -> None:
        if delivery.place.book is not None:
            self._engine.books.close(delivery.place)

    def forget(self, delivery: Delivery) -> bool:
        """Without acknowledgements a message leaves the store as it is handed out; False when another may have it."""
        if delivery.place.overdue:
            return False
        self.ack(delivery)
        return True

    def nack(self, delivery: Delivery, delay: float = 0.0) -> None:
        limit = self._engine.queues.limit_of(delivery.queue)
        if limit and delivery.count >= limit:
            self.dead_letter(delivery, f"delivery limit of {limit} reached: rejected with requeue")
        else:
            self._settle(delivery, "later" if delay > 0 else "nack", delay=delay)

    def hand_back(self, deliveries: Collection[Delivery]) -> None:
        for delivery in deliveries:
            self._settle(delivery, "back")

    def pass_on(self, delivery: Delivery, delay: float) -> None:
        """Back uncounted, so that another process can have it."""
        self._settle(delivery, "pass", delay=delay)

    def dead_letter(self, delivery: Delivery, reason: str, message: Message | None = None) -> None:
        room = self._engine.link.max_payload - GRAVE_HEADERS
        if message is not None and not delivery.settled and len(message.head) + len(message.body) <= room:
            delivery.message = message
        self._settle(delivery, "dead", reason=printable(reason))

    def _settle(self, delivery: Delivery, mode: str, *, delay: float = 0.0, reason: str = "") -> None:
        if not self._settling(delivery):
            return
        if delivery.lost:
            logger.debug("the lease of %s in %s was lost: %s does nothing", delivery.id, delivery.queue, mode)
            self._engine.holder.drop(delivery)
            return
        self._engine.settles.put(Settle(mode, delivery, delay, reason))

    def _settling(self, delivery: Delivery) -> bool:
        if delivery.settled or self._engine.closed or self._engine.forked():
            return False
        delivery.settled = True
        self._engine.let_go(delivery)
        return True
