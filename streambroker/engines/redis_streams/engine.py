"""Redis Streams consumer groups as an engine. Redis 6.2 up, Valkey."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ... import fork
from ...chores import Chores
from ...engine import Capabilities
from ...errors import Closed, StoreConnectionError, StoreError
from ...message import DeadLetter, Delivery, Message, QueueSpec
from ...real import make_lock
from ...settings import Settings
from .awaited import Awaited
from .client import Address
from .commands import Commands
from .connections import Connections, read_address
from .consumer import RedisConsumer
from .holder import Holder
from .inspector import RedisInspector
from .keys import GROUP
from .letters import Letters
from .maintenance import LEFT, Maintenance
from .publisher import Publisher, encode
from .queues import Queues
from .registry import Registry
from .resp import ReplyError, pack
from .settles import Packer, Settle
from .subscription import RedisSubscription, pack_broadcast
from .table import RedisTable

logger = logging.getLogger(__name__)

#: seconds that closing tries to get over a broken link, and waits for an answer
FAREWELL_PATIENCE, FAREWELL_TIMEOUT = 0.5, 2.0


class RedisStreamsEngine:
    """See `streambroker.engine.Engine`. Thread-safe. In a forked child it starts anew: publishing goes on with a new
    connection, consumers of the parent are closed there."""

    capabilities = Capabilities("redis-streams")

    def __init__(self, address: Address, settings: Settings) -> None:
        self.address = address
        self.settings = settings
        self.connections = Connections(address, settings, lambda: self.chores)
        self.make_link, self.make_commands = self.connections.link, self.connections.commands
        self.keys = self.connections.keys
        self.steps = tuple(range(len(settings.priority_steps)))
        self.commands = self.make_commands(settings.publish_timeout)
        self.queues = Queues(self)
        self._publisher = Publisher(self.commands, self.keys, settings, str(address), self.queues.published)
        self.letters = Letters(self)
        self._start()
        fork.register(self)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisStreamsEngine:
        """Raises ConfigurationError. Connects at first use."""
        return cls(*read_address(url, options))

    def __repr__(self) -> str:
        return f"<RedisStreamsEngine {self.address} prefix {self.settings.prefix!r}>"

    def _start(self) -> None:
        self._pid = os.getpid()
        self._closed = False
        self.holder = Holder()
        self.packer = Packer(self.keys, self.settings, self.limit_of)
        self._consumers: weakref.WeakSet[RedisConsumer] = weakref.WeakSet()
        self._subscriptions: weakref.WeakSet[RedisSubscription] = weakref.WeakSet()
        #: closed consumers whose deliveries may still be settled, or whose settlements are not yet confirmed
        self._settling: list[RedisConsumer] = []
        self._consuming: dict[str, int] = {}
        self.registry = Registry(self.keys, self.settings, self.holder)
        self._maintenance: Maintenance | None = None
        self._lock = make_lock()
        self.chores = Chores(str(self.address))
        self.awaited = Awaited(self)

    def ping(self, timeout: float = 5.0) -> float:
        start = time.monotonic()
        link = self.make_link(timeout)
        try:
            link.open()
            link.call("PING", timeout=timeout)
        finally:
            link.close()
        return time.monotonic() - start

    # ------------------------------------------------------------------ queues
    def declare(self, queue: QueueSpec) -> None:
        self.queues.declare(queue)
        if queue.max_length:
            self._publisher.max_lengths[queue.name] = queue.max_length

    def spec(self, queue: str) -> QueueSpec | None:
        return self.queues.spec(queue)

    def delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        if if_unused and self.consumers(queue):
            return -1
        removed = int(self.commands.script("remove", self.keys.whole(queue), GROUP, int(if_empty), *self.steps,
                                           patience=min(1.0, self.settings.publish_timeout)))
        if removed >= 0:
            self.queues.dropped(queue, self.commands)
            if self.commands.call("EXISTS", self.keys.dead(queue)):
                self.queues.graves.put(queue, "")
        return removed

    def consumers(self, queue: str) -> int:
        return sum(queue in worker.queues for worker in self.registry.workers(self.commands))

    def ready(self, queue: str) -> int:
        self.queues.learn_options(queue)
        return int(self.commands.script("size", self.keys.whole(queue), GROUP, self.ttl_of(queue), *self.steps)[0])

    def limit_of(self, queue: str) -> int:
        own = self.queues.limits.get(queue)
        return (self.settings.delivery_limit or 0) if own is None else own

    def ttl_of(self, queue: str) -> int:
        return self.queues.ttls.get(queue, 0)

    # ------------------------------------------------------------------ publishing
    def publish(self, queue: str, messages: Sequence[Message], *, create: bool = True) -> list[str]:
        return self._publisher.publish(queue, messages, create)

    def flush(self) -> None:
        self._publisher.flush()

    def broadcast(self, topic: str, message: Message, key: str = "") -> None:
        # nobody waits for it, and it may come from an event loop
        self.commands.call("PUBLISH", self.keys.topic(topic, key), pack_broadcast(key, encode(message)),
                           patience=min(1.0, self.settings.publish_timeout))

    def subscribe(self) -> RedisSubscription:
        subscription = RedisSubscription(self)
        self._subscriptions.add(subscription)
        return subscription

    # ------------------------------------------------------------------ consuming
    def consume(self, queues: Sequence[str], *, no_ack: bool = False) -> RedisConsumer:
        return RedisConsumer(self, queues, no_ack)

    def consumer_opened(self, consumer: RedisConsumer) -> None:
        self._consumers.add(consumer)

    def consumer_closed(self, consumer: RedisConsumer) -> None:
        with self._lock:
            if len(consumer.outbox) or consumer.held:
                self._settling.append(consumer)
        self._consumers.discard(consumer)
        if len(consumer.outbox):
            self.flush_settles(at_once=True)

    def consumers_open(self) -> list[RedisConsumer]:
        """Whoever may have settlements to send."""
        with self._lock:
            self._settling = [consumer for consumer in self._settling if consumer.held or len(consumer.outbox)]
            return [*self._consumers, *self._settling]

    def start_consuming(self, queue: str, consumer: RedisConsumer) -> None:
        self.queues.learn(queue)
        if consumer.no_ack and not self.queues.refresh(queue):
            return
        if not consumer.no_ack:
            with self._lock:
                self._consuming[queue] = self._consuming.get(queue, 0) + 1
            self._register()
        with self._lock:
            if self._maintenance is None:
                self._maintenance = Maintenance(self)
                self._maintenance.keeper.start()
        self._maintenance.keeper.wake_within(0.0)

    def stop_consuming(self, queues: Sequence[str], consumer: RedisConsumer) -> None:
        if consumer.no_ack or not queues:
            return
        with self._lock:
            for queue in queues:
                left = self._consuming.get(queue, 0) - 1
                if left > 0:
                    self._consuming[queue] = left
                else:
                    self._consuming.pop(queue, None)
        if self._closed:
            return
        try:
            self._register(patience=0.0)
        except (StoreConnectionError, Closed) as error:
            logger.debug("cannot tell the store which queues are consumed: %s", error)

    def _register(self, patience: float | None = None) -> None:
        """Tell the store which queues are consumed; again when another thread told it meanwhile what is older."""
        told: set[str] | None = None
        while told != {*self._consuming}:
            told = {*self._consuming}
            self.registry.register(self.commands, self.known_queues(), patience)

    def consumed(self) -> list[str]:
        return list(self._consuming)

    def known_queues(self) -> list[str]:
        """Queues that this process consumes or still holds something of."""
        return [*self._consuming, *(delivery.queue for delivery in self.holder.mine())]

    def refreshes(self, queues: Sequence[str]) -> list[tuple[float, bytes]]:
        """(seconds, command) that keep the transient ones of `queues` in being."""
        return [pair for queue in queues for pair in self.queues.refresh(queue)]

    # ------------------------------------------------------------------ for the keeper
    def oldest_settle(self) -> float | None:
        times = [consumer.driven for consumer in self.consumers_open() if len(consumer.outbox)]
        return min(times) if times else None

    def doubt(self, queues: Sequence[str]) -> None:
        if self._maintenance is not None:
            for queue in queues:
                self._maintenance.doubt(queue)

    def expect_due(self, queues: Sequence[str], when: float) -> None:
        if self._maintenance is not None:
            for queue in queues:
                self._maintenance.expect_due(queue, when)

    def flush_settles(self, at_once: bool) -> None:
        """See that settlements which no receive sends go out."""
        if self._maintenance is not None and self._maintenance.keeper.running:
            self._maintenance.keeper.wake_within(0.0 if at_once else 0.1)
            return
        for consumer in self.consumers_open():
            if consumer.closed and len(consumer.outbox):
                try:
                    self.send_settles(consumer.outbox.take(), self.commands, consumer)
                except (StoreConnectionError, Closed) as error:
                    logger.debug("settlements of a closed consumer cannot be sent: %s", error)

    def send_settles(self, batch: list[Settle], commands: Commands, consumer: Any) -> None:
        """Send and wait for the answers; what fails goes back to its consumer."""
        packed = self.packer.pack(batch)
        try:
            replies = commands.many([data for data, _ in packed])
        except StoreConnectionError:
            if consumer is not None:
                consumer.outbox.give_back(batch)
            raise
        for (_, settles), reply in zip(packed, replies, strict=True):
            if isinstance(reply, ReplyError):
                if consumer is not None:
                    consumer.outbox.give_back(settles)
                self.chores.report(f"the store refuses settlements: {reply}")
                continue
            self.settled(settles, reply)

    def settled(self, settles: list[Settle], reply: Any) -> None:
        """The store has confirmed settlements."""
        self.holder.settled(settles)
        if isinstance(reply, list) and reply[1]:
            self.letters.buried(settles[0].queue)

    # ------------------------------------------------------------------ dead letters
    def forward_dead_letters(self, queue: str, forward: Callable[[DeadLetter], bool]) -> None:
        self.letters.forward(queue, forward)

    def watch_convictions(self, queue: str, tell: Callable[[DeadLetter], None]) -> None:
        self.letters.watch(queue, tell)

    # ------------------------------------------------------------------ the rest
    def table(self, name: str) -> RedisTable:
        return RedisTable(self.commands, self.keys, name)

    def inspector(self) -> RedisInspector:
        return RedisInspector(self)

    def forked(self) -> bool:
        return os.getpid() != self._pid

    def close(self, keep: Collection[Delivery] = ()) -> None:
        """Hand everything back, say goodbye (unless something is kept), close all connections."""
        if self._closed:
            return
        self._closed = True
        for consumer in [*self._consumers]:
            consumer.close(keep)
        for subscription in [*self._subscriptions]:
            subscription.close()
        if self._maintenance is not None:
            self._maintenance.stop()
        # a connection of its own: others may be stuck in the one for requests
        farewell = self.make_commands(FAREWELL_PATIENCE, FAREWELL_TIMEOUT)
        try:
            self._publisher.flush()
            self._goodbye(farewell, leave=not keep)
            self.chores.do()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot say goodbye: %s", error)
        self._maintenance = None
        farewell.close()
        self.commands.close()
        self.awaited.close()
        self.connections.close()

    def _goodbye(self, farewell: Commands, *, leave: bool) -> None:
        for consumer in self.consumers_open():
            if len(consumer.outbox):
                self.send_settles(consumer.outbox.take(), farewell, None)
        if self.registry.registered and leave:
            for queue in self.queues.touched:
                try:
                    for name in (self.holder.name, *self.holder.old_names):
                        while farewell.run(self.queues.reclaim(queue, name, 500, LEFT))[2]:
                            pass
                except StoreError as error:
                    logger.debug("queue %r cannot be left in order: %s", queue, error)
            self.registry.unregister(farewell)
        farewell.many([pack("DEL", key) for key in self._publisher.own_keys()])

    def after_fork(self) -> None:
        consumers, subscriptions, maintenance = [*self._consumers], [*self._subscriptions], self._maintenance
        self.commands.after_fork()
        self.awaited.after_fork()
        self._publisher.after_fork()
        for consumer in consumers:
            consumer.after_fork()
        for subscription in subscriptions:
            subscription.after_fork()
        if maintenance is not None:
            maintenance.after_fork()
        self._start()
