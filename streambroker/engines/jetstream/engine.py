"""JetStream pull consumers as an engine. nats-server 2.10 up."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any

from ... import fork
from ...chores import Chores
from ...engine import Capabilities
from ...errors import Closed, StoreConnectionError, StoreError
from ...message import DeadLetter, Delivery, Message, QueueSpec
from ...settings import JetStreamSettings, read_settings
from .acks import Acks
from .address import CLIENT_OPTIONS, Address
from .admin import delete_queue
from .api import Api
from .books import Books
from .census import Census, take_census
from .claims import Claims
from .consumer import JetStreamConsumer
from .consumption import Consumption
from .delays import LateRelay
from .frames import Frame
from .holder import Holder
from .inspector import JetStreamInspector
from .janitor import RowJanitor
from .link import Link
from .names import Names
from .plain import Plain
from .publisher import Publisher
from .queues import Queues
from .settles import Settles
from .stranded import Stranded
from .streams import Streams
from .subscription import JetStreamSubscription, broadcast
from .table import JetStreamTable
from .trials import Trials
from .watch import Watch

logger = logging.getLogger(__name__)

#: how long closing waits for the store to do something, and as long as it does (seconds)
FAREWELL, LONGEST = 2.0, 30.0
#: how long others may take to tell what they hold (seconds)
CENSUS = 0.5


class JetStreamEngine:
    """See `streambroker.engine.Engine`. Thread-safe. In a forked child it starts anew: publishing goes on with a new
    connection, consumers of the parent are closed there."""

    capabilities = Capabilities("jetstream")

    def __init__(self, address: Address, settings: JetStreamSettings) -> None:
        self.address = address
        self.settings = settings
        self.names = Names(settings.prefix, settings.stream_per_queue)
        self.lease = settings.visibility_timeout
        self.steps = tuple(range(len(settings.priority_steps)))
        self.link = Link(address, settings)
        self.api = Api(self.link, settings)
        self.streams = Streams(self.link, self.api, self.names, settings)
        self.queues = Queues(self)
        self.books = Books(self)
        self.acks = Acks(self)
        self.settles = Settles(self)
        self.plain = Plain(self.link, settings)
        self._publisher = Publisher(self)
        self._forwards: dict[str, Callable[[DeadLetter], bool]] = {}
        self._tellers: dict[str, Callable[[DeadLetter], None]] = {}
        self._start()
        fork.register(self)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> JetStreamEngine:
        """Raises ConfigurationError. Connects at first use."""
        client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
        return cls(Address(url, client), read_settings(
            {name: value for name, value in options.items() if name not in client}, JetStreamSettings))

    def __repr__(self) -> str:
        return f"<JetStreamEngine {self.address} prefix {self.settings.prefix!r}>"

    def _start(self) -> None:
        self._pid = os.getpid()
        self.closed = False
        self.holder = Holder()
        self.trials = Trials(self)
        self.watch = Watch(self)
        self.claims = Claims(self)
        self.chores = Chores(str(self.address))
        self.janitor = RowJanitor(self)
        self.stranded = Stranded(self)
        self.relay = LateRelay(self)
        self._subscriptions: weakref.WeakSet[JetStreamSubscription] = weakref.WeakSet()
        self.consumption = Consumption(self)
        self.link.on_connect.append(self._connected)
        self.link.on_disconnect.append(self._disconnected)

    def _connected(self) -> None:
        if self.link.epoch > 1:
            self.streams.forget_all()
            self.claims.reconnected()
        self.acks.reconnected()
        self.settles.reconnected()
        self.watch.reconnected()
        for consumer in self.consumption.consumers():
            consumer.reconnected()
        self.consumption.all_steps_changed()

    def _disconnected(self) -> None:
        for consumer in self.consumption.consumers():
            consumer.wake()
        for subscription in list(self._subscriptions):
            subscription.wake()

    def ping(self, timeout: float = 5.0) -> float:
        start = time.monotonic()
        self._check()
        self.link.open(timeout, once=True)
        self.api.call("INFO", patience=0.0, timeout=timeout)
        return time.monotonic() - start

    def stream_of(self, subject: str, queue: str) -> str:
        """The stream that takes a publish."""
        names = self.names
        start = len(names.root)
        kind = subject[start:start + 3]
        return names.late if kind == ".l." else names.transient if kind == ".t." else names.stream(queue)

    def settle_in_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it in the link's thread and wait for it, for some seconds at most."""
        try:
            self.link.run(work, FAREWELL)
        except (StoreConnectionError, Closed) as error:
            logger.debug("the link's thread is not done: %s", error)

    def tell(self, news: dict[str, str]) -> None:
        self.link.post([Frame(self.names.news, json.dumps(news).encode())])

    def declare(self, queue: QueueSpec) -> None:
        self._check()
        self.queues.declare(queue)

    async def redeclare(self, queue: str) -> None:
        """A transient queue whose consumer is gone, in the link's thread."""
        spec = self.queues.known(queue)
        if spec is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.queues.declare, spec)

    def spec(self, queue: str) -> QueueSpec | None:
        self._check()
        return self.queues.spec(queue)

    def delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        self._check()
        if if_unused and self.consumers(queue):
            return -1
        return delete_queue(self, queue, if_empty=if_empty)

    def consumers(self, queue: str) -> int:
        return sum(queue in each.queues for each in self.census())

    def ready(self, queue: str) -> int:
        self._check()
        return self.inspector().ready(queue)

    def census(self, timeout: float = CENSUS) -> list[Census]:
        """What all processes hold, after our own acks are through. Raises StoreConnectionError, StoreError."""
        self._check()
        self.link.open(self.settings.socket_connect_timeout)
        self.acked(timeout)
        return self.link.run(partial(take_census, self, timeout), self.settings.socket_timeout)

    def settled(self, timeout: float) -> None:
        """Send acks, and wait until what was given back or up is in the store, `timeout` seconds at most."""
        self.acks.send()
        if self.settles.returning:
            self.settles.wait(timeout)

    def acked(self, timeout: float) -> None:
        """The same, and until the acks are there too."""
        self.settled(timeout)
        acks = self.acks.last()
        if acks:
            self.link.requests(acks, timeout)

    def trim(self, queue: str, most: int) -> None:
        """Remove the oldest ready messages beyond `most`."""
        excess = self.ready(queue) - most
        if excess > 0:
            self.inspector().drop_oldest(queue, excess)

    # ------------------------------------------------------------------ publishing
    def publish(self, queue: str, messages: Sequence[Message], *, create: bool = True) -> list[str]:
        self._check()
        return self._publisher.publish(queue, messages, create)

    def publish_again(self, queue: str, frames: Sequence[tuple[int, Frame]]) -> None:
        """Store what was stored before: frames with their steps."""
        for step in {step for step, _ in frames}:
            self.queues.tell_step(queue, step)
        self._publisher.send(queue, [frame for _, frame in frames])

    def flush(self) -> None:
        self._check()
        self._publisher.flush()

    def broadcast(self, topic: str, message: Message, key: str = "") -> None:
        self._check()
        broadcast(self, topic, message, key)

    def subscribe(self) -> JetStreamSubscription:
        self._check()
        subscription = JetStreamSubscription(self)
        self._subscriptions.add(subscription)
        return subscription

    # ------------------------------------------------------------------ consuming
    def consume(self, queues: Sequence[str], *, no_ack: bool = False) -> JetStreamConsumer:
        self._check()
        self.link.open(self.settings.socket_connect_timeout)
        return JetStreamConsumer(self, queues, no_ack)

    # ------------------------------------------------------------------ what is held
    def let_go(self, delivery: Delivery) -> None:
        """It is settled or lost: no consumer has it any more."""
        holder = self.holder
        holder.take_back(delivery)
        if delivery.lost:
            holder.drop(delivery)
        self.trials.let_go(delivery)

    def expire(self, delivery: Delivery, consumer: JetStreamConsumer) -> None:
        """Too old to be delivered."""
        delivery.settled = True
        self.let_go(delivery)
        self.holder.drop(delivery)
        self.acks.put(delivery.place.reply)
        self.books.close(delivery.place)

    # ------------------------------------------------------------------ dead letters that go elsewhere
    def forward_dead_letters(self, queue: str, forward: Callable[[DeadLetter], bool]) -> None:
        self._forwards[queue] = forward
        self.buried(queue)

    def buried(self, queue: str) -> None:
        """A message of `queue` became a dead letter; from any thread."""
        if queue in self._forwards:
            self.chores.add(partial(self._forward, queue))
            for consumer in self.consumption.consumers():
                consumer.wake()

    def _forward(self, queue: str) -> None:
        inspector = self.inspector()
        for letter in inspector.dead(queue):
            if self._forwards[queue](letter):
                inspector.dead_remove(queue, [letter.id])

    def watch_convictions(self, queue: str, tell: Callable[[DeadLetter], None]) -> None:
        self._tellers[queue] = tell

    def convicted(self, letter: DeadLetter) -> None:
        """It became a dead letter for what it did to its workers; from any thread."""
        if letter.queue in self._tellers:
            self.chores.add(partial(self._tellers[letter.queue], letter))
            for consumer in self.consumption.consumers():
                consumer.wake()

    def table(self, name: str) -> JetStreamTable:
        return JetStreamTable(self, name)

    def inspector(self) -> JetStreamInspector:
        return JetStreamInspector(self)

    def forked(self) -> bool:
        return os.getpid() != self._pid

    def _check(self) -> None:
        if self.closed:
            raise Closed("this engine was closed; make a new one with connect()")

    def close(self, keep: Collection[Delivery] = ()) -> None:
        """Hand everything back, say goodbye (unless something is kept), close the connection."""
        if self.closed:
            return
        if self.forked():
            self.closed = True
            return
        for consumer in self.consumption.consumers():
            consumer.close(keep)
        for subscription in [*self._subscriptions]:
            subscription.close()
        if self.link.connected:
            self._goodbye(keep)
        self.closed = True
        self.plain.close()
        self.link.close()

    def _goodbye(self, keep: Collection[Delivery]) -> None:
        self.acks.send()
        kept = {id(delivery) for delivery in keep}
        for delivery in list(self.holder.held.values()):
            if not delivery.settled and id(delivery) not in kept:
                delivery.place.consumer.hand_back([delivery])
        self.settles.finish(FAREWELL, LONGEST)
        try:
            self._publisher.flush()
            acks = self.acks.last()
            if acks:
                self.link.requests(acks, 1.0)
            if not keep:
                self.link.run(self._leave, FAREWELL)
            self.chores.do()
        except (StoreConnectionError, StoreError) as error:
            logger.debug("cannot say goodbye: %s", error)

    async def _leave(self) -> None:
        self.relay.stop()
        self.janitor.stop()
        await self.books.finish()
        await self.watch.stop()

    def after_fork(self) -> None:
        consumers, subscriptions = self.consumption.consumers(), [*self._subscriptions]
        self.link.after_fork()
        self.plain.after_fork()
        self.acks.start()
        self.settles.start()
        self.books.start()
        self._publisher.start()
        for consumer in consumers:
            consumer.after_fork()
        for subscription in subscriptions:
            subscription.after_fork()
        self._start()
