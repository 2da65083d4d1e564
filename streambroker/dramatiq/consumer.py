"""Where a worker's messages come from and how it settles them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.errors import ConnectionClosed, DecodeError

from ..errors import AuthenticationError, Closed, StoreConnectionError, StreambrokerError
from ..message import Delivery, Message, QueueSpec
from . import bodies
from .failures import unavailable

if TYPE_CHECKING:
    from ..engine import Consumer
    from .broker import StreamBroker

logger = logging.getLogger(__name__)

#: how long fewer free places than half of the prefetch wait for more, so that one request serves several messages (s)
GATHER = 0.005
#: how long a new consumer waits for a store that is away, and the pause between two tries (s)
PATIENCE, TRY = 10.0, 0.25
#: when a message comes again whose retry could not be stored (s)
AGAIN = 1.0


class StreamMessage(dramatiq.MessageProxy):
    """A message with the delivery that brought it. Settled through that, whichever consumer its queue has by then."""

    def __init__(self, message: dramatiq.Message[Any], delivery: Delivery, source: Consumer) -> None:
        super().__init__(message)
        self.delivery = delivery
        #: the consumer of the engine that settles it, also when it is closed
        self.source = source
        #: its retry is not in the store: it must not be acknowledged
        self.kept = False
        #: another worker has it: nothing is left to do here
        self.gone = False

    @property
    def delivery_count(self) -> int:
        """1 the first time; lost leases and killed workers count, retries are new messages."""
        return self.delivery.count

    @property
    def redelivered(self) -> bool:
        """Whether it was handed to a worker before."""
        return self.delivery.redelivered or self.delivery.count > 1

    @property
    def delivery_token(self) -> tuple[str, int]:
        """Fencing token: a later hand-over of the same message has a greater one."""
        return self.delivery.token


class StreamConsumer(dramatiq.Consumer):
    """One thread iterates; settling, requeueing and closing come from any.

    `prefetch` bounds what the process has of the queue and has not settled, what earlier consumers brought included.
    """

    def __init__(self, broker: StreamBroker, queue_name: str, prefetch: int, timeout: int) -> None:
        self.broker = broker
        self.queue_name = queue_name
        self.prefetch = max(1, prefetch)
        self.timeout = timeout
        self._unsettled = broker.unsettled(queue_name)
        broker.engine.watch_convictions(queue_name, broker.convicted)
        self._arrived: deque[Delivery] = deque()
        with unavailable():
            self._source = self._open()

    def _open(self) -> Consumer:
        """While the store is away Dramatiq makes a consumer anew every three seconds, and says so each time."""
        engine, deadline = self.broker.engine, time.monotonic() + PATIENCE
        while True:
            try:
                if engine.spec(self.queue_name) is None:
                    # tools know it, also when it is empty
                    engine.declare(QueueSpec(self.queue_name))
                return engine.consume([self.queue_name])
            except StoreConnectionError as error:
                if isinstance(error, AuthenticationError) or time.monotonic() >= deadline:
                    raise
                time.sleep(TRY)

    # ------------------------------------------------------------------ receiving
    def __next__(self) -> StreamMessage | None:
        deadline = 0.0
        while True:
            while self._arrived:
                message = self._accept(self._arrived.popleft())
                if message is not None:
                    return message
            now = time.monotonic()
            deadline = deadline or now + self.timeout / 1000
            left = deadline - now
            room = self._room(max(0.0, left))
            with unavailable():
                self._arrived.extend(self._source.receive(left if room and left > 0 else 0.0, room))
            if not self._arrived and (left <= 0 or room):
                return None

    def _room(self, left: float) -> int:
        """Free places; 0 when there are none for `left` seconds."""
        free = self.prefetch - len(self._unsettled)
        if 2 * free >= self.prefetch:
            return free
        self._unsettled.wait(self.prefetch // 2, min(left, GATHER) if free > 0 else left)
        return max(0, self.prefetch - len(self._unsettled))

    def _accept(self, delivery: Delivery) -> StreamMessage | None:
        """For the worker; None when it is not for it, or not yet."""
        try:
            message = bodies.decode(delivery.message.body, self.queue_name)
            if delivery.replayed:
                message = bodies.revived(message)
            message, left = bodies.take_eta(message)
        except Exception as error:  # noqa: BLE001  whatever it is: the thread would come back to it again and again
            cause = error.error or error if isinstance(error, DecodeError) else error
            reason = f"undecodable: {bodies.reason_of(cause)}"
            logger.error("queue %r: a message becomes a dead letter, it is %s", self.queue_name, reason)
            with unavailable():
                self._source.dead_letter(delivery, reason)
            return None
        if left > 0:
            with unavailable():
                self._postpone(delivery, message, left)
            return None
        proxy = StreamMessage(message, delivery, self._source)
        self._unsettled.add(proxy)
        return proxy

    def _postpone(self, delivery: Delivery, message: dramatiq.Message[Any], left: float) -> None:
        """The waiting of a message that another program gave an `eta` is the store's."""
        try:
            delay = bodies.checked_delay(left)
        except ValueError as error:
            self._source.dead_letter(delivery, f"eta: {error}")
            return
        later: Message = delivery.message._replace(body=message.encode(), delay=delay)
        try:
            self.broker.engine.publish(self.queue_name, [later])
        except BaseException:
            self._source.hand_back([delivery])
            raise
        self._source.ack(delivery)

    # ------------------------------------------------------------------ settling
    def ack(self, message: dramatiq.MessageProxy) -> None:
        if not isinstance(message, StreamMessage):
            return
        if self.broker.ack_confirm and not message.kept and not message.gone and message in self._unsettled:
            self._ack_now(message)
        if not self._unsettled.remove(message) or message.gone:
            return
        if message.kept:
            logger.warning("queue %r: the retry of message %s could not be stored, so this delivery comes again",
                           self.queue_name, message.message_id)
            message.source.nack(message.delivery, AGAIN)
        else:
            message.source.ack(message.delivery)

    @staticmethod
    def _ack_now(message: StreamMessage) -> None:
        try:
            message.source.ack_now(message.delivery)
        except Closed:
            # nobody waits for a broker that was closed
            return
        except StreambrokerError as error:
            raise ConnectionClosed(str(error)) from error

    def nack(self, message: dramatiq.MessageProxy) -> None:
        if not isinstance(message, StreamMessage) or not self._unsettled.remove(message):
            return
        delivery = message.delivery
        message.source.dead_letter(delivery, bodies.reason_of(message._exception),
                                    bodies.dead_copy(message, delivery.message))

    def requeue(self, messages: Iterable[dramatiq.MessageProxy]) -> None:
        for message in messages:
            if isinstance(message, StreamMessage) and self._unsettled.remove(message):
                message.source.hand_back([message.delivery])

    def close(self) -> None:
        """What no worker thread has seen goes back at once, what they have stays with this process."""
        self._arrived.clear()
        with unavailable():
            self._source.close([message.delivery for message in self._unsettled.messages()])
