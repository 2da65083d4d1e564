"""One engine a process for each (URL, options), shared by all connections of the process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..connection import connect
from ..errors import StreambrokerError
from ..fork import register
from .deadletters import DeadLetterExchanges
from .publisher import Publisher
from .routing import Router

if TYPE_CHECKING:
    from ..engine import Engine, SharedTable
    from ..message import QueueSpec
    from .conninfo import Endpoint
    from .qos import QoS
    from .transport import Transport

logger = logging.getLogger(__name__)


class SharedEngine:
    """The engine of an endpoint and what its connections have in common. Thread-safe.

    After a fork the child's first use makes a new engine; the parent's is kept, untouched, so that nothing in the child
    closes it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.adapter = endpoint.adapter
        self.users = 0
        self.transports: weakref.WeakSet[Transport] = weakref.WeakSet()
        #: what the garbage collector found to be done, for whoever comes by: it runs anywhere, also inside a lock
        self.orphans: deque[Callable[[], object]] = deque()
        #: closed channels that still own deliveries of running tasks
        self.keeping: set[QoS] = set()
        self.router = Router(self)
        self.publisher = Publisher(self)
        self.dead_letters = DeadLetterExchanges(self)
        self._engine: Engine | None = None
        self._tables: dict[str, SharedTable] = {}
        self._parents: list[Engine] = []

    @property
    def engine(self) -> Engine:
        """Raises ConfigurationError for options that cannot be used; connects at first use."""
        engine = self._engine
        return self._open() if engine is None else engine

    def _open(self) -> Engine:
        with _registry.lock:
            if self._engine is None:
                self._engine = connect(self.endpoint.url, **self.endpoint.options)
            return self._engine

    def table(self, name: str) -> SharedTable:
        """Kept, since a table's copy of its rows is part of it."""
        table = self._tables.get(name)
        if table is None:
            table = self._tables[name] = self.engine.table(name)
        return table

    def remember(self, spec: QueueSpec) -> None:
        """This process declared it."""
        if spec.durable:
            self.publisher.lasting.add(spec.name)
            self.router.remember_queue(spec)
        else:
            self.publisher.transient.add(spec.name)

    def forget(self, queue: str, *, transient: bool) -> None:
        """This process deleted it. Bindings of a transient queue have gone with it."""
        self.publisher.lasting.discard(queue)
        self.router.drop_queue(queue, look=not transient)

    def sweep(self) -> None:
        """Do what the garbage collector left."""
        while self.orphans:
            try:
                orphan = self.orphans.popleft()
            except IndexError:
                return
            orphan()

    def close(self) -> None:
        self.sweep()
        if self._engine is not None:
            self._engine.close()

    def after_fork(self) -> None:
        if self._engine is not None:
            self._parents.append(self._engine)
        self._engine = None
        self._tables = {}
        self.transports = weakref.WeakSet()
        self.orphans = deque()
        self.keeping = set()


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engines: dict[Any, SharedEngine] = {}

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        for shared in self.engines.values():
            shared.after_fork()


_registry = _Registry()
register(_registry)


def acquire(endpoint: Endpoint, transport: Transport) -> SharedEngine:
    """The engine for `endpoint`, with one more user."""
    with _registry.lock:
        shared = _registry.engines.get(endpoint.key)
        if shared is None:
            shared = _registry.engines[endpoint.key] = SharedEngine(endpoint)
        shared.users += 1
        shared.transports.add(transport)
    shared.sweep()
    return shared


def release(shared: SharedEngine) -> None:
    """One user less; the last one closes the engine, unless running tasks of a lost connection still need it: then the
    next connection goes on with it, and the end of the process closes it."""
    with _registry.lock:
        shared.users -= 1
        if shared.users > 0 or shared.keeping:
            return
        _registry.engines.pop(shared.endpoint.key, None)
    shared.close()


class Closable(Protocol):
    def close(self) -> None: ...


def watch(transport: Transport, shared: SharedEngine, opened: list[Closable]) -> Callable[[], object]:
    """A connection that is dropped without being closed is closed by whoever uses the engine next: what its consumers
    hold would stay with this process. `opened` lists what is to be closed and must not lead back to the transport.
    The returned function ends the watch."""
    finalizer = weakref.finalize(transport, _dropped, os.getpid(), shared, opened)
    finalizer.atexit = False
    return finalizer.detach


def _dropped(pid: int, shared: SharedEngine, opened: list[Closable]) -> None:
    if pid == os.getpid():
        shared.orphans.append(partial(_close_dropped, shared, opened))


def _close_dropped(shared: SharedEngine, opened: Iterable[Closable]) -> None:
    logger.warning("a connection to %s was dropped without being closed", shared.endpoint.place)
    for each in opened:
        each.close()
    release(shared)


@atexit.register
def _close_all() -> None:
    """A program that ends without closing its connections still hands back what it has."""
    for shared in list(_registry.engines.values()):
        try:
            for transport in list(shared.transports):
                transport.close_connection(transport)
            shared.close()
        except StreambrokerError as error:
            logger.debug("closing at exit: %s", error)
