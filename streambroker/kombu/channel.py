"""The channel: Kombu's verbs on the engine."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amqp.exceptions import ChannelError, RecoverableConnectionError
from kombu.utils.uuid import uuid

from ..errors import StreambrokerError
from ..message import Delivery, printable
from .batch import PublishBatch
from .deadletters import is_refusal, reason_for, undecodable_head
from .feeds import Intake, Listener
from .message import Message
from .qos import QoS, Settler
from .topology import Topology

if TYPE_CHECKING:
    from .transport import Transport

logger = logging.getLogger(__name__)


class Channel(Topology):
    """One channel of a connection. Publishing and settling are free for all threads and greenlets; the rest belongs to
    one at a time, as everywhere in Kombu. Raises the errors of `failures`."""

    supports_batch_publish = True

    def __init__(self, connection: Transport, channel_id: int) -> None:
        self.connection: Transport | None = connection
        self.channel_id = channel_id
        self.closed = False
        self.flowing = True
        self.shared = connection.shared
        self.qos = QoS(self)
        self.no_ack_consumers: set[str] = set()
        #: `basic_return` callbacks of producers that publish with `mandatory=True`
        self.events: defaultdict[str, set[Callable[..., Any]]] = defaultdict(set)
        self.credit_freed = connection.wakeup.set_if_waited_for
        self._listeners: dict[str, Listener] = {}
        self._intakes: dict[bool, Intake] = {}
        self._cancelled: set[str] = set()

    # Publishing

    def prepare_message(self, body: Any, priority: int | None = None, content_type: str | None = None,
                        content_encoding: str | None = None, headers: dict[str, Any] | None = None,
                        properties: dict[str, Any] | None = None) -> dict[str, Any]:
        properties = properties or {}
        properties.setdefault("priority", priority or 0)
        return {"body": body, "content-type": content_type, "content-encoding": content_encoding,
                "headers": headers or {}, "properties": properties}

    def basic_publish(self, message: Any, exchange: str = "", routing_key: str = "", mandatory: bool = False,
                      **kwargs: Any) -> None:
        """Returns when the store has the message, in every queue that wanted it."""
        if not isinstance(message, dict):
            message = self.prepare_message(message, content_type="text/plain", content_encoding="utf-8")
        if not self.shared.publisher.publish(message, exchange or "", routing_key or "") and mandatory:
            self.returned(message, exchange, routing_key)

    def returned(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        error = ChannelError("NO_ROUTE", (60, 50), "Basic.return", 312)
        for callback in list(self.events["basic_return"]):
            callback(error, exchange, routing_key, message)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        return PublishBatch(self, max_size)

    # Consuming

    def basic_consume(self, queue: str, no_ack: bool = False, callback: Callable[[Message], Any] | None = None,
                      consumer_tag: str = "", **kwargs: Any) -> str:
        transport = self.transport()
        tag = consumer_tag or f"ctag-{uuid()}"
        listener = Listener(tag, queue, bool(no_ack), callback or (lambda message: None), self)
        live = transport.live.get(queue)
        if live is not None:
            live.listeners.append(listener)
        if live is None or self.shared.router.is_bound_here(queue):
            transport.prepare_consuming(queue)
            self._intake(listener.no_ack).add(listener)
        self._listeners[tag] = listener
        self._cancelled.discard(queue)
        if no_ack:
            self.no_ack_consumers.add(tag)
        return tag

    def basic_cancel(self, consumer_tag: str, **kwargs: Any) -> None:
        """Stops at once; what was fetched and not handed over goes back. A queue with `auto_delete` goes with its last
        consumer."""
        listener = self._listeners.pop(consumer_tag, None)
        if listener is None:
            return
        self.no_ack_consumers.discard(consumer_tag)
        transport = self.transport()
        live = transport.live.get(listener.queue)
        if live is not None and listener in live.listeners:
            live.listeners.remove(listener)
            if live.auto_delete and not live.listeners:
                transport.live.delete(live)
        intake = self._intakes.get(listener.no_ack)
        if intake is not None and intake.remove(listener):
            self._cancelled.add(listener.queue)
            transport.consumer_gone(listener.queue)
            if listener.no_ack and not intake.listeners:
                # nothing of it can come back: its link is not kept for the next time, such as a worker's mingle
                del self._intakes[True]
                transport.feeds.remove(intake)
                intake.close()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        transport = self.transport()
        live = transport.live.get(queue)
        if live is not None:
            transport.live.collect()
            delivery = live.take()
            if delivery is not None:
                return self._receive(delivery, live, "", no_ack)
        if live is None or self.shared.router.is_bound_here(queue):
            transport.prepare_consuming(queue)
            for delivery, consumer in transport.getter.get(queue, bool(no_ack)):
                return self._receive(delivery, consumer, "", no_ack)
        return None

    def deliver(self, delivery: Delivery, settler: Settler, listener: Listener) -> None:
        message = self._receive(delivery, settler, listener.tag, listener.no_ack)
        if message is None:
            return
        try:
            listener.callback(message)
        except Exception as error:
            if not is_refusal(error):
                raise
            # Celery's event loop ends the worker for it, and the next one, and so on
            logger.error("queue %r: Celery cannot take message %s, it is a dead letter", delivery.queue, delivery.id,
                         exc_info=error)
            self.bury(message.delivery_tag, f"invalid task message: {type(error).__name__}: {error}")

    def _receive(self, delivery: Delivery, settler: Settler, consumer_tag: str, no_ack: bool) -> Message | None:
        tag = f"{delivery.queue}:{delivery.id}:{delivery.count}"
        try:
            message = Message(self, delivery, tag, consumer_tag)
        except ValueError as error:
            logger.warning("queue %r: message %s cannot be read and is a dead letter: %s", delivery.queue, delivery.id,
                           printable(str(error)))
            settler.dead_letter(delivery, undecodable_head(delivery, error))
            return None
        if not no_ack:
            self.qos.hold(settler, delivery, message)
        return message

    def message_to_python(self, raw_message: Message) -> Message:
        return raw_message

    def _intake(self, no_ack: bool) -> Intake:
        intake = self._intakes.get(no_ack)
        if intake is None:
            intake = self._intakes[no_ack] = Intake(self, no_ack=no_ack)
            self.transport().feeds.append(intake)
        return intake

    # Settling: from any thread, on closed channels too, and never raising

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        held = self.qos.release(delivery_tag)
        if held is not None:
            held.settler.ack(held.delivery)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        held = self.qos.release(delivery_tag)
        if held is None:
            return
        if not requeue:
            self.shared.dead_letters.bury(held, reason_for(held.message()))
        elif held.delivery.queue in self._cancelled:
            # a worker that stops rejects what runs: that says nothing about the message
            held.settler.hand_back([held.delivery])
        else:
            held.settler.nack(held.delivery)

    def bury(self, delivery_tag: str, reason: str) -> None:
        """Make it a dead letter."""
        held = self.qos.release(delivery_tag)
        if held is not None:
            self.shared.dead_letters.bury(held, reason)

    def basic_recover(self, requeue: bool = False) -> None:
        """Hand everything unsettled back."""
        if not requeue:
            raise NotImplementedError("basic_recover works with requeue=True only")
        for held in self.qos.release_all():
            held.settler.hand_back([held.delivery])

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        self.qos.limit(prefetch_count or 0)

    def flow(self, active: bool = True) -> None:
        """Pause or resume deliveries to this channel."""
        self.flowing = active

    # The end

    def close(self) -> None:
        """Cancels its consumers and hands back what is unsettled; after a lost connection what is still in use is kept
        and can be settled later. May be called twice."""
        transport = self.connection
        if self.closed or transport is None:
            return
        self.closed = True
        if transport.pid == os.getpid():
            self._leave(transport)
        transport.forget_channel(self)
        self.connection = None

    def _leave(self, transport: Transport) -> None:
        keep: list[Delivery] = []
        if transport.broken:
            transport.live.drop_channel(self)
            keep = self.qos.keep_living()
        else:
            for tag in list(self._listeners):
                try:
                    self.basic_cancel(tag)
                except StreambrokerError as error:
                    logger.debug("cancelling at the end of a channel: %s", error)
            for held in self.qos.release_all():
                held.settler.hand_back([held.delivery])
        if keep:
            self.shared.keeping.add(self.qos)
        self._listeners.clear()
        for intake in self._intakes.values():
            transport.feeds.remove(intake)
            intake.close(keep)

    def transport(self) -> Transport:
        if self.connection is None:
            raise RecoverableConnectionError("this channel is closed")
        return self.connection

