"""Who consumes what in this process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...errors import StoreConnectionError, StoreError
from ...real import make_lock

if TYPE_CHECKING:
    from .consumer import JetStreamConsumer
    from .engine import JetStreamEngine

logger = logging.getLogger(__name__)


class Consumption:
    """Of one engine. Thread-safe."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._consumers: weakref.WeakSet[JetStreamConsumer] = weakref.WeakSet()
        self._consuming: dict[str, int] = {}
        self._watching = False
        self._lock = make_lock()

    def opened(self, consumer: JetStreamConsumer) -> None:
        self._consumers.add(consumer)

    def closed(self, consumer: JetStreamConsumer) -> None:
        self._consumers.discard(consumer)

    def consumers(self) -> list[JetStreamConsumer]:
        """Those that are open."""
        return [consumer for consumer in list(self._consumers) if not consumer.closed]

    def start(self, queue: str, consumer: JetStreamConsumer) -> None:
        """Tell the store that `queue` is consumed, and look after what is held from now on. Blocks."""
        if not consumer.no_ack:
            with self._lock:
                self._consuming[queue] = self._consuming.get(queue, 0) + 1
        self._engine.queues.learn(queue)
        if not consumer.no_ack:
            # books are written without waiting
            self._engine.streams.ensure(self._engine.names.state)
        with self._lock:
            start, self._watching = not self._watching, True
        if start:
            self._engine.link.call_soon(self._start_watch)
        if not consumer.no_ack:
            self._engine.link.run(self._engine.watch.join, self._engine.settings.socket_timeout)

    def _start_watch(self) -> None:
        settings = self._engine.settings
        self._engine.chores.say(logging.INFO, "consuming from %s: lease %g s, delivery limit %s", self._engine.address,
                                settings.visibility_timeout, settings.delivery_limit or "none")
        self._engine.watch.start()
        self._engine.janitor.start()
        self._engine.relay.start()

    def stop(self, queues: Sequence[str], consumer: JetStreamConsumer) -> None:
        if consumer.no_ack or not queues:
            return
        with self._lock:
            for queue in queues:
                left = self._consuming.get(queue, 0) - 1
                if left > 0:
                    self._consuming[queue] = left
                else:
                    self._consuming.pop(queue, None)
        self._engine.settle_in_loop(self._engine.watch.consuming_less)

    def queues(self) -> list[str]:
        """What is consumed with acknowledgements, sorted."""
        return sorted(self._consuming)

    def steps_changed(self, queue: str) -> None:
        """A priority step of `queue` is used for the first time, or the store has lost what it knew of it; in the
        link's thread."""
        for consumer in self.consumers():
            if queue in consumer.queues:
                self._add_steps(consumer, queue)

    def all_steps_changed(self) -> None:
        """The same, of queues that are not known."""
        for consumer in self.consumers():
            for queue in consumer.queues:
                self._add_steps(consumer, queue)

    def _add_steps(self, consumer: JetStreamConsumer, queue: str) -> None:
        self._engine.chores.add(partial(self._look_again, consumer, queue))
        consumer.wake()

    def _look_again(self, consumer: JetStreamConsumer, queue: str) -> None:
        if not consumer.closed and queue in consumer.queues:
            try:
                self._engine.queues.restore(queue)
                consumer.add_lanes(queue)
            except (StoreConnectionError, StoreError) as error:
                logger.debug("steps of %r are looked up later: %s", queue, error)
