"""`basic_get`: one message, now."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine import Consumer
    from ..message import Delivery
    from .shared import Closable, SharedEngine


class Getter:
    """Consumers of one connection that only fetch when they are asked. Thread-safe."""

    def __init__(self, shared: SharedEngine, opened: list[Closable]) -> None:
        self._shared = shared
        self._opened = opened
        self._consumers: dict[bool, tuple[Consumer, str]] = {}
        self._lock = threading.Lock()

    def get(self, queue: str, no_ack: bool) -> list[tuple[Delivery, Consumer]]:
        """None or one."""
        with self._lock:
            consumer, current = self._consumers.get(no_ack) or self._open(no_ack)
            if current != queue:
                if current:
                    consumer.discard(current)
                self._consumers[no_ack] = consumer, ""
                consumer.add(queue)
                self._consumers[no_ack] = consumer, queue
            return [(delivery, consumer) for delivery in consumer.fetch(1)]

    def _open(self, no_ack: bool) -> tuple[Consumer, str]:
        consumer = self._shared.engine.consume([], no_ack=no_ack)
        self._opened.append(consumer)
        return consumer, ""

    def leave(self, queue: str) -> None:
        """Do not count as a consumer of `queue` any more."""
        with self._lock:
            for no_ack, (consumer, current) in self._consumers.items():
                if current == queue:
                    consumer.discard(queue)
                    self._consumers[no_ack] = consumer, ""

    def close(self, keep: list[Delivery]) -> None:
        with self._lock:
            for consumer, _ in self._consumers.values():
                consumer.close(keep)
            self._consumers.clear()
