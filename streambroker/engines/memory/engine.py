"""`MemoryEngine`: the seam's Engine over a store in memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from ...engine import Capabilities
from ...errors import Closed, ConfigurationError, MessageTooLarge
from ...message import DeadLetter, Delivery, Message, QueueSpec
from ...settings import Settings, read_settings
from .consumer import MemoryConsumer, MemorySubscription
from .inspector import MemoryInspector
from .queue import Holder
from .store import Clock, Grave, Store

_STORES: dict[str, Store] = {}
os.register_at_fork(after_in_child=_STORES.clear)


class MemoryEngine:
    """A store that lives in this process. Engines of one name share it, each is a holder of its own, as if it were a
    process; after a fork the child starts with an empty one."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store = store
        self.settings = settings
        self.holder = Holder(settings)
        self.receivers: list[MemoryConsumer | MemorySubscription] = []
        self.forwards: dict[str, Callable[[DeadLetter], bool]] = {}
        self.tellers: dict[str, Callable[[DeadLetter], None]] = {}
        self._pid = os.getpid()
        self._closed = False
        self._inspector = MemoryInspector(self)
        with store.lock:
            store.holders.append(self.holder)

    @classmethod
    def from_url(cls, url: str, *, clock: Clock | None = None, **options: Any) -> MemoryEngine:
        """`memory://name`: the store of that name, made when it is not there, then with `clock` (monotonic seconds).

        Raises ConfigurationError for unknown options and for a URL of another kind.
        """
        parts = urlsplit(url)
        if parts.scheme.lower() != "memory":
            raise ConfigurationError(f"{parts.scheme}:// is no memory store; use memory://name")
        settings = read_settings(options)
        name = f"{settings.prefix}/{unquote(parts.netloc + parts.path)}"
        store = _STORES.get(name) or _STORES.setdefault(name, Store(clock or time.monotonic))
        return cls(store, settings)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="memory", persistent=False)

    def foreign(self) -> bool:
        """Whether this is a forked child, which must leave its parent's engine alone."""
        return os.getpid() != self._pid

    def unusable(self) -> bool:
        return self._closed or self.foreign()

    @contextmanager
    def turn(self) -> Iterator[Store]:
        if self.foreign():
            raise Closed("this engine belongs to the parent process; make a new one with connect() after the fork")
        if self._closed:
            raise Closed("this engine was closed; make a new one with connect()")
        with self.store.turn() as store:
            yield store

    def declare(self, queue: QueueSpec) -> None:
        with self.turn() as store:
            store.declare(queue)

    def spec(self, queue: str) -> QueueSpec | None:
        with self.turn() as store:
            return store.queues[queue].spec if queue in store.queues else None

    def delete(self, queue: str, *, if_unused: bool = False, if_empty: bool = False) -> int:
        with self.turn() as store:
            found = store.queues.get(queue)
            if if_unused and store.consumers(queue) or if_empty and found and found.waiting():
                return -1
            return store.remove(queue)

    def consumers(self, queue: str) -> int:
        with self.turn() as store:
            return store.consumers(queue)

    def ready(self, queue: str) -> int:
        with self.turn() as store:
            return len(store.queues[queue].ready) if queue in store.queues else 0

    def publish(self, queue: str, messages: Sequence[Message], *, create: bool = True) -> list[str]:
        most = self.settings.max_message_size
        for message in messages:
            size = len(message.body) + len(message.head)
            if size > most:
                raise MessageTooLarge(f"a message of {size} bytes for {queue!r} is over max_message_size ({most}); "
                                      "raise the option or store the data elsewhere and send a reference")
        with self.turn() as store:
            found = store.queues.get(queue)
            if found is None:
                if not create:
                    return []
                found = store.declare(QueueSpec(queue))
            steps = len(self.settings.priority_steps)
            return [store.add(found, message, steps) for message in messages]

    def flush(self) -> None:
        with self.turn():
            pass

    def consume(self, queues: Sequence[str], *, no_ack: bool = False) -> MemoryConsumer:
        with self.turn():
            consumer = MemoryConsumer(self, queues, no_ack=no_ack)
            self.receivers.append(consumer)
            return consumer

    def broadcast(self, topic: str, message: Message, key: str = "") -> None:
        with self.turn() as store:
            for hear in store.topics:
                hear(topic, key, message)

    def subscribe(self) -> MemorySubscription:
        with self.turn():
            subscription = MemorySubscription(self)
            self.receivers.append(subscription)
            return subscription

    def table(self, name: str) -> MemoryTable:
        return MemoryTable(self, name)

    def inspector(self) -> MemoryInspector:
        return self._inspector

    def forward_dead_letters(self, queue: str, forward: Callable[[DeadLetter], bool]) -> None:
        with self.turn():
            self.forwards[queue] = forward

    def watch_convictions(self, queue: str, tell: Callable[[DeadLetter], None]) -> None:
        with self.turn():
            self.tellers[queue] = tell

    def offers(self, queue: str) -> list[Grave]:
        """Dead letters that this engine should offer to its forwarder, now or at their `offer` time."""
        return list(self.store.graves.get(queue, {}).values()) if queue in self.forwards else []

    def ping(self, timeout: float = 5.0) -> float:
        start = time.perf_counter()
        with self.turn():
            return time.perf_counter() - start

    def close(self, keep: Collection[Delivery] = ()) -> None:
        if self.unusable():
            return
        for receiver in list(self.receivers):
            if isinstance(receiver, MemoryConsumer):
                receiver.close(keep)
            else:
                receiver.close()
        with self.turn() as store:
            if keep:
                self.holder.died = store.now
            else:
                store.leave(self.holder)
        self._closed = True

    def kill(self) -> None:
        """For tests: from now on this holder gives no sign of life, as after a SIGKILL. It can still try to settle,
        as a process that was only stopped would."""
        with self.turn() as store:
            self.holder.died = store.now
            for receiver in self.receivers:
                receiver.shut()
            self.receivers.clear()


class MemoryTable:
    """See `streambroker.engine.SharedTable`."""

    def __init__(self, engine: MemoryEngine, name: str) -> None:
        self._engine = engine
        self._name = name

    def rows(self, max_age: float = 0.0, *, patient: bool = True) -> Mapping[str, str]:
        with self._engine.turn() as store:
            return MappingProxyType({key: value for key, (value, _) in store.tables.get(self._name, {}).items()})

    def put(self, key: str, value: str, queue: str = "") -> bool:
        with self._engine.turn() as store:
            table = store.tables.setdefault(self._name, {})
            changed = table.get(key, ("", ""))[0] != value or key not in table
            table[key] = value, queue
            return changed

    def delete(self, keys: Collection[str]) -> int:
        with self._engine.turn() as store:
            table = store.tables.get(self._name, {})
            return sum(table.pop(key, None) is not None for key in set(keys))
