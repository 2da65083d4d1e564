"""Brokers of one store, workers inside the test, and what the middleware was told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq

from streambroker.dramatiq import StreamBroker, StreamConsumer, StreamMessage


class MemoryBroker(StreamBroker):
    """On the memory engine."""

    schemes = frozenset({"memory"})
    default_url = "memory://default"


class Brokers:
    """Makes brokers on one store under one prefix, each as if it were in a process of its own; closes them."""

    def __init__(self, kind: type[StreamBroker], url: str, **options: Any) -> None:
        self._kind, self._url, self._options = kind, url, options
        self._made: list[StreamBroker] = []

    def __call__(self, **options: Any) -> StreamBroker:
        broker = self._kind(url=self._url, **{**self._options, **options})
        self._made.append(broker)
        return broker

    def close(self) -> None:
        for broker in self._made:
            broker.close()


class Signals(dramatiq.Middleware):
    """Writes down what it is told of messages."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.nacked: list[dramatiq.MessageProxy] = []
        self.errors: list[BaseException | None] = []

    def _note(self, text: str) -> None:
        self.seen.append(text)

    def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
        self._note(f"before_enqueue {delay}")

    def after_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
        self._note(f"after_enqueue {delay}")

    def before_delay_message(self, broker: Any, message: Any) -> None:
        self._note("before_delay_message")

    def before_process_message(self, broker: Any, message: Any) -> None:
        self._note("before_process")

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self._note("after_process" + (" exception" if exception is not None else ""))

    def before_ack(self, broker: Any, message: Any) -> None:
        self._note("before_ack")

    def after_ack(self, broker: Any, message: Any) -> None:
        self._note("after_ack")

    def before_nack(self, broker: Any, message: Any) -> None:
        self._note("before_nack")
        self.errors.append(message._exception)

    def after_nack(self, broker: Any, message: Any) -> None:
        self._note("after_nack")
        self.nacked.append(message)


def message(*args: Any, queue: str = "default", actor: str = "nobody", **options: Any) -> dramatiq.Message[Any]:
    return dramatiq.Message(queue_name=queue, actor_name=actor, args=args, kwargs={}, options=options)


def take(consumer: StreamConsumer, count: int, seconds: float = 5.0) -> list[StreamMessage]:
    """Up to `count` within `seconds`."""
    got: list[StreamMessage] = []
    end = time.monotonic() + seconds
    while len(got) < count and time.monotonic() < end:
        found = next(consumer)
        if found is not None:
            got.append(found)
    return got


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


@contextmanager
def working(broker: StreamBroker, threads: int = 2, **options: Any) -> Iterator[dramatiq.Worker]:
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=threads, **options)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
