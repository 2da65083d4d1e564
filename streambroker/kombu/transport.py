"""The transports: connections as Kombu drives them, in an event loop or by draining."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from kombu.transport import base

from .. import __version__
from ..errors import AuthenticationError, Closed, StoreConnectionError, StreambrokerError
from . import failures
from .channel import Channel as _Channel
from .conninfo import Endpoint, jetstream_endpoint, memory_endpoint, redis_endpoint, sentinel_endpoint
from .feeds import Feed
from .getter import Getter
from .live import LiveQueues
from .loop import DrainWakeup, HubDriver
from .shared import Closable, SharedEngine, acquire, release, watch

if TYPE_CHECKING:
    from kombu import Connection

    from .queues import Declared

logger = logging.getLogger(__name__)

#: how long a drain waits when the prefetch is used up: acknowledgements of other threads may depend on its return
SATURATED_WAIT = 0.01
#: how long the end of a connection waits for a store that may be gone
FAREWELL = 2.0
#: how long a drain with a time-out of 0 waits for the answer to its own request
GRACE = 0.005


class Management(base.Management):
    """Kombu's view of the bindings (`celery list bindings`)."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.channel = transport.client.channel()

    def get_bindings(self) -> list[dict[str, str]]:
        return [{"destination": queue, "source": exchange, "routing_key": key}
                for queue, exchange, key in self.channel.list_bindings()]

    def close(self) -> None:
        self.channel.close()


class Transport(base.Transport):
    """One connection, which is this object itself. All I/O is the shared engine's; making a transport does none.

    In a forked child everything that belongs to the parent's connection is left alone.
    """

    Channel = _Channel
    Management = Management
    #: Celery turns mingle, gossip and `worker_disable_prefetch` on for this type alone
    driver_type = "redis"
    driver_name = "streambroker"
    polling_interval = None
    can_parse_url = False

    connection_errors = failures.CONNECTION_ERRORS
    channel_errors = failures.CHANNEL_ERRORS
    recoverable_connection_errors = failures.RECOVERABLE_CONNECTION_ERRORS
    recoverable_channel_errors = failures.RECOVERABLE_CHANNEL_ERRORS

    implements = base.Transport.implements.extend(
        asynchronous=True, heartbeats=False, batch_publish=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]))

    shared: SharedEngine
    live: LiveQueues
    getter: Getter

    def __init__(self, client: Connection, **kwargs: Any) -> None:
        self.client = client
        self._turn = 0
        self._start()

    def _start(self) -> None:
        """As new, also in a child that inherited a connection, which is left alone."""
        self.pid = os.getpid()
        self.channels: list[_Channel] = []
        self.feeds: list[Feed] = []
        self.declared: dict[str, Declared] = {}
        self.wakeup = DrainWakeup()
        #: what the engine has open for this connection
        self.opened: list[Closable] = [self.wakeup]
        self.connected = False
        #: the last thing heard of the link was an error
        self.broken = False
        self._draining = threading.RLock()
        self._deleted: set[str] = set()
        self._prepared: set[str] = set()
        self._ids = itertools.count(1)
        self._driver: HubDriver | None = None

    @abstractmethod
    def endpoint(self) -> Endpoint:
        """Which engine this connection uses. Raises ConfigurationError."""

    # Life of the connection

    def establish_connection(self) -> Transport:
        """Raises StoreConnectionError, LoginRefused, ConfigurationError."""
        self._start()
        shared = acquire(self.endpoint(), self)
        try:
            shared.engine.ping(self.client.connect_timeout or 5.0)
        except AuthenticationError as error:
            release(shared)
            failures.refusals.pause()
            raise failures.LoginRefused.of(error) from error
        except StreambrokerError:
            release(shared)
            raise
        failures.refusals.over()
        self.shared = shared
        self.live = LiveQueues(shared, self.opened)
        self.getter = Getter(shared, self.opened)
        self._unwatch = watch(self, shared, self.opened)
        self.feeds.append(self.live)
        self.connected = True
        return self

    def create_channel(self, connection: Transport) -> _Channel:
        channel = _Channel(connection, next(self._ids))
        self.channels.append(channel)
        return channel

    def close_channel(self, channel: _Channel) -> None:
        channel.close()

    def forget_channel(self, channel: _Channel) -> None:
        if channel in self.channels:
            self.channels.remove(channel)

    def verify_connection(self, connection: Transport) -> bool:
        return self.connected and self.pid == os.getpid()

    def close_connection(self, connection: Transport) -> None:
        """Hands back what is unsettled. May be called twice."""
        if not self.verify_connection(connection):
            return
        self.connected = False
        self._unwatch()
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        for channel in list(self.channels):
            channel.close()
        self.getter.close([delivery for qos in list(self.shared.keeping) for delivery in qos.deliveries()])
        if not self.broken:
            self._delete_exclusive_queues()
        self.live.close()
        self.feeds.clear()
        self.wakeup.close()
        release(self.shared)

    def _collect(self, connection: Transport) -> None:
        """Kombu gives this connection up, after an error or in a forked child."""
        if self.pid == os.getpid():
            self.broken = True
            self.close_connection(connection)

    def _delete_exclusive_queues(self) -> None:
        names = [name for name, known in self.declared.items() if known.exclusive and self.live.get(name) is None]
        try:
            if names:
                # a store that is gone is not waited for
                self.shared.engine.ping(FAREWELL)
            for name in names:
                self.shared.engine.delete(name)
                self.shared.forget(name, transient=True)
        except StreambrokerError as error:
            logger.debug("exclusive queues are left to expire: %s", error)

    # Consuming

    def prepare_consuming(self, queue: str) -> None:
        """Make the queue again when it went with its last consumer; learn its dead-letter exchange."""
        known = self.declared.get(queue)
        if queue in self._deleted and known is not None:
            self._deleted.discard(queue)
            self.shared.engine.declare(known.spec)
            self.shared.remember(known.spec)
        if queue not in self._prepared:
            spec = known.spec if known is not None else self.shared.engine.spec(queue)
            if spec is not None:
                self._prepared.add(queue)
                self.shared.dead_letters.learn(queue, spec.arguments)

    def forget_queue(self, queue: str) -> Declared | None:
        """It was deleted; how it was declared here."""
        self._prepared.discard(queue)
        return self.declared.pop(queue, None)

    def remember_queue(self, known: Declared) -> None:
        self.declared[known.spec.name] = known
        self._prepared.discard(known.spec.name)
        self._deleted.discard(known.spec.name)
        self.shared.remember(known.spec)

    def consumer_gone(self, queue: str) -> None:
        """The last consumer of `queue` on a channel was cancelled."""
        known = self.declared.get(queue)
        if known is None or not known.auto_delete or self.broken:
            return
        for transport in list(self.shared.transports):
            # single gets of this process, on other connections too, are no consumers
            if transport.connected:
                transport.getter.leave(queue)
        if self.shared.engine.delete(queue, if_unused=True) >= 0:
            self._deleted.add(queue)
            self.shared.forget(queue, transient=True)

    def pump(self, one: bool = False, quiet: bool = True) -> int:
        """Let the feeds send and hand over what has arrived; with `one` at most one message without acknowledgement,
        without `quiet` only feeds that have something to do. How many. Never waits."""
        if self.shared.orphans:
            self.shared.sweep()
        handed = 0
        for feed in self.feeds[self._turn:] + self.feeds[:self._turn]:
            if not quiet and feed.is_quiet():
                continue
            single = one and feed.one_by_one
            if single and handed:
                continue
            now = self.pump_one(feed, 1 if single else None)
            handed += now
            if single and now:
                self._turn = (self._turn + 1) % max(1, len(self.feeds))
        return handed

    def pump_one(self, feed: Feed, most: int | None = None) -> int:
        """Let one feed do so. Raises StoreConnectionError, and what a callback raises."""
        if feed not in self.feeds:
            return 0
        try:
            handed = feed.pump(most)
        except (StoreConnectionError, Closed):
            self.broken = True
            raise
        self.broken = False
        return handed

    def drain_events(self, connection: Transport, timeout: float | None = None) -> None:
        """Hand over what arrives first. Raises TimeoutError (socket.timeout) when nothing came, after about 10 ms when
        nothing can come because the prefetch is used up."""
        if not self._draining.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError("timed out")
        try:
            self._drain(timeout)
        finally:
            self._draining.release()

    def _drain(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + max(timeout, GRACE)
        if not self.verify_connection(self):
            raise Closed("this connection is closed or belongs to the parent process")
        while not self.pump(one=True):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("timed out")
            if any(feed.saturated for feed in self.feeds):
                self.wakeup.wait(self.feeds, SATURATED_WAIT if left is None else min(left, SATURATED_WAIT))
                if self.pump(one=True):
                    return
                if left is not None:
                    raise TimeoutError("timed out")
            else:
                self.wakeup.wait(self.feeds, left)

    def register_with_event_loop(self, connection: Transport, loop: Any) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver = HubDriver(self, loop)

    # What Kombu asks

    def driver_version(self) -> str:
        return __version__

    def qos_semantics_matches_spec(self, connection: Transport) -> bool:
        """False: a changed prefetch count reaches running consumers, which Celery makes use of."""
        return False

    @property
    def default_connection_params(self) -> dict[str, Any]:
        # a client of redis-py says by itself where the store is
        return {} if self.client.transport_options.get("client") else {
            "hostname": "localhost", "port": self.default_port}


class RedisStreamsTransport(Transport):
    """`redis-streams://`, `rediss-streams://` (TLS, verified unless told otherwise), `valkey-streams://`,
    `redis-streams+unix:///path`."""

    default_port = 6379
    driver_name = "streambroker redis-streams"

    def endpoint(self) -> Endpoint:
        return redis_endpoint(self.client)


class SentinelStreamsTransport(Transport):
    """`sentinel-streams://`, `sentinel-streams+rediss://` (TLS): the primary that the sentinels name. The URLs of a
    failover list are sentinels of one group."""

    default_port = 26379
    driver_name = "streambroker redis-streams"

    def endpoint(self) -> Endpoint:
        return sentinel_endpoint(self.client)


class JetStreamTransport(Transport):
    """`jetstream://`, `jetstream-tls://` (verified unless told otherwise)."""

    default_port = 4222
    driver_name = "streambroker jetstream"

    def __init__(self, client: Connection, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        if client.userid and not client.password:
            # a token: Kombu and Celery show who logs in, and hide what is a password
            client.userid, client.password = None, client.userid

    def endpoint(self) -> Endpoint:
        return jetstream_endpoint(self.client)


class MemoryTransport(Transport):
    """`streambroker-memory://name`: a store inside this process, for tests."""

    driver_name = "streambroker memory"

    def endpoint(self) -> Endpoint:
        return memory_endpoint(self.client)
