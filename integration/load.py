"""Publishing all the while that something else happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from streambroker.connection import connect
from streambroker.errors import Closed, StoreConnectionError
from streambroker.message import Message
from streambroker.testing.servers import wait_until


@contextmanager
def steady(rate: float, send: Callable[[int], object]) -> Iterator[None]:
    """Call `send(0)`, `send(1)`... from a thread of its own, `rate` times a second at most."""
    over = threading.Event()

    def publish() -> None:
        number = 0
        while not over.wait(1 / rate):
            send(number)
            number += 1

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Load:
    """A producer of 100 messages a second to some queues and a consumer of all, each with an engine of its own, and
    what both saw: which publishes were `confirmed`, how many `refused`, how long the `longest` took."""

    def __init__(self, url: str, prefix: str, queues: Sequence[str], **more: Any) -> None:
        options: dict[str, Any] = {"prefix": prefix, "publish_timeout": 20.0, "reconnect_timeout": 30.0, **more}
        self.queues = queues
        self.producer, self.worker = connect(url, **options), connect(url, **options)
        self.confirmed: list[str] = []
        #: when each delivery was received
        self.received: dict[str, list[float]] = {}
        self.longest = 0.0
        self.refused = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._publish, self._consume)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.received) > 50, 30, "the first messages")
        return self

    def __exit__(self, *_: object) -> None:
        """End the producer, and the consumer when everything has come."""
        self._stop.set()
        self._threads[0].join(30)
        try:
            wait_until(lambda: not self.missing(), 30, "everything confirmed has come")
        finally:
            self.worker.close()
            self._threads[1].join(20)
            self.producer.close()

    def missing(self) -> set[str]:
        return set(self.confirmed) - self.received.keys()

    def doubled(self, explained: Sequence[float] = (), within: float = 0.0) -> list[str]:
        """Messages that came twice, whose first hand-over was not from 2 s before any of these moments (monotonic) to
        `within` seconds after it."""
        return [name for name, times in self.received.items() if len(times) > 1
                and not any(-2 < times[0] - moment < within for moment in explained)]

    def progress(self, count: int, timeout: float = 20.0) -> None:
        """Until that many more have come from each queue."""
        before = {queue: self._of(queue) for queue in self.queues}
        wait_until(lambda: all(self._of(queue) >= before[queue] + count for queue in self.queues), timeout,
                   "each queue goes on")

    def _of(self, queue: str) -> int:
        return sum(name.startswith(f"{queue} ") for name in [*self.received])

    def _publish(self) -> None:
        number = 0
        while not self._stop.is_set():
            start = time.monotonic()
            queue = self.queues[number % len(self.queues)]
            try:
                self.producer.publish(queue, [Message(f"{queue} {number}".encode())])
                self.confirmed.append(f"{queue} {number}")
            except StoreConnectionError:
                self.refused += 1
            number += 1
            taken = time.monotonic() - start
            self.longest = max(self.longest, taken)
            self._stop.wait(max(0.0, 0.01 - taken))

    def _consume(self) -> None:
        consumer = self.worker.consume(self.queues)
        while True:
            try:
                for delivery in consumer.receive(1.0, 20):
                    self.received.setdefault(delivery.message.body.decode(), []).append(time.monotonic())
                    consumer.ack(delivery)
            except Closed:
                return
            except StoreConnectionError:
                continue
