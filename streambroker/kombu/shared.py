"""One engine a process for each (URL, options), shared by all connections of the process."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from ..connection import connect
from ..errors import StreambrokerError
from ..fork import register
from .deadletters import DeadLetterExchanges
from .publisher import Publisher
from .routing import Router

if TYPE_CHECKING:
    from ..engine import Engine, SharedTable
    from ..message import Delivery, QueueSpec
    from .conninfo import Endpoint
    from .qos import QoS, Settler
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
        #: deliveries whose message died unsettled after its channel: to be handed back by whoever comes by
        self.orphans: deque[tuple[Settler, Delivery]] = deque()
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
        """Hand orphans back."""
        while self.orphans:
            try:
                settler, delivery = self.orphans.popleft()
            except IndexError:
                return
            settler.hand_back([delivery])

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
    """The engine for `endpoint`, with one more user. No I/O."""
    with _registry.lock:
        shared = _registry.engines.get(endpoint.key)
        if shared is None:
            shared = _registry.engines[endpoint.key] = SharedEngine(endpoint)
        shared.users += 1
        shared.transports.add(transport)
        return shared


def release(shared: SharedEngine, transport: Transport) -> None:
    """One user less; the last one closes the engine, unless running tasks of a lost connection still need it: then the
    next connection goes on with it, and the end of the process closes it."""
    with _registry.lock:
        shared.users -= 1
        shared.transports.discard(transport)
        if shared.users > 0 or shared.keeping:
            return
        _registry.engines.pop(shared.endpoint.key, None)
    shared.close()


@atexit.register
def _close_all() -> None:
    """A program that ends without closing its connections still hands back what it has."""
    for shared in list(_registry.engines.values()):
        for transport in list(shared.transports):
            transport.close_connection(transport)
        try:
            shared.close()
        except StreambrokerError as error:
            logger.debug("closing at exit: %s", error)
