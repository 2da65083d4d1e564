"""The brokers. One base, and a thin class for each store."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import dramatiq
from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout
from dramatiq.middleware import Middleware, SkipMessage

from .. import fork
from ..connection import JETSTREAM_SCHEMES, REDIS_SCHEMES, connect
from ..engine import Engine
from ..errors import Closed, ConfigurationError, MessageTooLarge, StoreConnectionError
from ..message import DeadLetter, Message
from ..settings import JetStreamSettings, Settings
from . import bodies
from .consumer import StreamConsumer, StreamMessage
from .failures import DeliveryLimitExceeded, unavailable
from .options import engine_options
from .unsettled import Unsettled


class StreamBroker(dramatiq.Broker):
    """What both brokers are. Thread-safe; usable in a forked child, which makes its own connections.

    Making one and declaring queues does no I/O.
    """

    settings_class: ClassVar[type[Settings]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset()
    default_url: ClassVar[str] = ""

    def __init__(self, *, url: str | None = None, middleware: list[Middleware] | None = None,
                 max_priority: int | None = None, ack_confirm: bool = False, **options: Any) -> None:
        super().__init__(middleware=middleware)
        self.queues: set[str] = set()
        #: whether a worker thread waits until the store has confirmed its acknowledgement
        self.ack_confirm = ack_confirm
        self.max_priority = max_priority
        place = url or self.default_url
        scheme = place.partition("://")[0].lower()
        if scheme not in self.schemes:
            raise ConfigurationError(f"{type(self).__name__} takes a URL such as {self.default_url}, not {scheme}://")
        self.engine: Engine = connect(place, **engine_options(options, self.settings_class, max_priority))
        self._unsettled: dict[str, Unsettled] = {}
        fork.register(self)

    @property
    def consumer_class(self) -> type[StreamConsumer]:
        return StreamConsumer

    # ------------------------------------------------------------------ queues
    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        return set(self.queues)

    def get_declared_delay_queues(self) -> set[str]:
        """None: messages that wait for their time are the store's."""
        return set()

    # ------------------------------------------------------------------ messages
    def enqueue(self, message: dramatiq.Message[Any], *, delay: int | None = None) -> dramatiq.Message[Any]:
        """Returns when the store has the message (see `confirm`). `delay` is ms, ten years at most.

        Raises ConnectionClosed when the store cannot be reached for `publish_timeout`, MessageTooLarge, ValueError.
        """
        self.emit_before("enqueue", message, delay)
        seconds = bodies.checked_delay(bodies.take_eta(message)[1] if delay is None else delay)
        try:
            self._publish(bodies.with_short_traceback(message), seconds)
        except BaseException as error:
            self._keep(message)
            if isinstance(error, (StoreConnectionError, Closed)):
                # what concerns the message alone (size, permission) stays what it is
                raise ConnectionClosed(str(error)) from error
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def _publish(self, message: dramatiq.Message[Any], delay: float) -> None:
        """A retry that is too large with its traceback goes without: another failure has its own."""
        stored = Message(message.encode(), bodies.head_of(message.actor_name), message.message_id, self._step(message),
                         delay)
        try:
            self.engine.publish(message.queue_name, [stored])
        except MessageTooLarge:
            if "traceback" not in message.options:
                raise
            self._publish(bodies.without_traceback(message), delay)

    def _step(self, message: dramatiq.Message[Any]) -> int:
        """Priority as the store has it: 0 first."""
        priority = message.options.get("broker_priority")
        if priority is None:
            return self.max_priority or 0
        if self.max_priority is None:
            raise ConfigurationError("broker_priority needs queues with priorities: give the broker max_priority=N")
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= self.max_priority:
            raise ConfigurationError(f"broker_priority {priority!r} is none of 0 to {self.max_priority} (max_priority)")
        return self.max_priority - priority

    def _keep(self, message: dramatiq.Message[Any]) -> None:
        """A retry has the id of the message that is running. Dramatiq acknowledges that one also when its retry could
        not be enqueued."""
        for each in self.unsettled(message.queue_name).messages():
            if each.message_id == message.message_id:
                each.kept = True

    def unsettled(self, queue_name: str) -> Unsettled:
        """What this process has of a queue."""
        return self._unsettled.setdefault(queue_name, Unsettled())

    def convicted(self, letter: DeadLetter) -> None:
        """It killed its workers until the store gave it up: told to the middleware like any other failure."""
        try:
            message = dramatiq.MessageProxy(bodies.decode(letter.message.body, letter.queue))
        except DecodeError:
            return
        message.fail()
        message.stuff_exception(DeliveryLimitExceeded(letter.reason))
        self.logger.error("Message %s of queue %r is a dead letter: %s.", message.message_id, letter.queue,
                          letter.reason)
        self.emit_before("nack", message)
        self.emit_after("nack", message)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> StreamConsumer:
        return self.consumer_class(self, queue_name, prefetch, timeout)

    # ------------------------------------------------------------------ running
    def emit_before(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """What waits in a process that was out of reach is not started when others have it meanwhile."""
        if signal == "process_message" and isinstance(args[0], StreamMessage) and args[0].delivery.taken:
            args[0].gone = True
            raise SkipMessage("this process was taken for dead, another one has the message")
        super().emit_before(signal, *args, **kwargs)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal == "skip_message" and isinstance(args[0], StreamMessage) and args[0].gone:
            # its result is another one's to tell
            return
        super().emit_after(signal, *args, **kwargs)

    # ------------------------------------------------------------------ looking and steering
    def get_queue_message_counts(self, queue_name: str) -> tuple[int, int, int]:
        """(ready, delayed, dead)."""
        with unavailable():
            stats = self.engine.inspector().stats(queue_name)
        return stats.ready, stats.delayed, stats.dead

    def flush(self, queue_name: str) -> None:
        """Drop ready, delayed and dead messages, never running ones."""
        with unavailable():
            inspector = self.engine.inspector()
            inspector.purge(queue_name)
            inspector.dead_remove(queue_name, [letter.id for letter in inspector.dead(queue_name)])

    def flush_all(self) -> None:
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None, interval: int = 50, **_: Any) -> None:
        """Until no process has anything of the queue left, ready, running or delayed. All times are ms.

        Keywords that only other brokers' `join` knows are accepted and have no effect. Raises QueueJoinTimeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            if not len(self.unsettled(queue_name)):
                with unavailable():
                    stats = self.engine.inspector().stats(queue_name)
                if not (stats.ready or stats.delayed or stats.in_flight):
                    return
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    # ------------------------------------------------------------------ end
    def close(self) -> None:
        """Hand back what is not running, end threads and connections. May be called twice."""
        running = [each.delivery for queue in self._unsettled.values() for each in queue.messages()]
        with unavailable():
            self.engine.close(running)

    def after_fork(self) -> None:
        self._unsettled = {}


class RedisStreamsBroker(StreamBroker):
    """Messages in Redis Streams: Redis 6.2 up, Valkey. `url` as for redis-py; or `host`, `port`, `db` and the like, or
    a ready `client`, or `sentinels`, a list of (host, port), with `master_name`."""

    schemes = REDIS_SCHEMES
    default_url = "redis://localhost:6379/0"

    def __init__(self, *, url: str | None = None, client: Any = None, **options: Any) -> None:
        if client is not None:
            options["client"] = client
            url = url or "redis-streams://"
        elif url is None and "sentinels" in options:
            url = "sentinel-streams://"
        elif url is None and {"host", "port", "db", "path"} & options.keys():
            url = "redis-streams://"
        super().__init__(url=url, **options)


class JetStreamBroker(StreamBroker):
    """Messages in NATS JetStream: nats-server 2.10 up. `servers` lists further servers of the cluster."""

    settings_class = JetStreamSettings
    schemes = JETSTREAM_SCHEMES
    default_url = "nats://localhost:4222"
