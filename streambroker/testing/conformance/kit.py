"""What the suite needs of an engine under test, and the small words that its tests are written in."""

from __future__ import annotations

import select
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...engine import Consumer, Engine, Subscription
from ...message import Delivery, Message

#: seconds within which everything that does not wait for a lease must have happened
SOON = 5.0
#: longest time between a death and the moment when the messages are elsewhere, beyond the lease
MARGIN = 5.0
#: the lease that the suite works with
LEASE = 1.0


@dataclass(frozen=True)
class Taken:
    """A delivery that a mortal has."""

    id: str
    body: bytes
    count: int
    redelivered: bool


class Mortal(Protocol):
    """A consuming process of its own, made to die suddenly."""

    @property
    def holder(self) -> str:
        """Its name, as the inspector shows it; known once it holds something."""

    def take(self, queue: str, limit: int = 10, timeout: float = SOON) -> list[Taken]:
        """Wait until something comes or `timeout`, then take what comes in a moment, up to `limit`; fetch once when
        `timeout` is 0. What it takes it holds."""

    def settle(self, how: str, *ids: str) -> None:
        """`ack`, `nack`, `hand_back` or `dead_letter` what it holds."""

    def stop(self) -> None:
        """Freeze, as SIGSTOP does: no sign of life, no connection lost."""

    def resume(self) -> None: ...

    def die(self) -> None:
        """As by SIGKILL. May be called twice."""


class Engines(ABC):
    """The `engines` fixture: makes engines on one store, each a holder of its own, and lets time pass.

    A binding gives `make`, `mortal` and `advance`. `quiet` is how long to look before saying that nothing comes.
    """

    quiet = 0.3

    def __init__(self) -> None:
        self._made: list[Engine] = []
        self._mortals: list[Mortal] = []

    @abstractmethod
    def make(self, **options: Any) -> Engine:
        """A new engine on the store under test."""

    @abstractmethod
    def make_mortal(self, **options: Any) -> Mortal:
        """A new process with an engine on the store under test."""

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Let so much time pass by the store's clock."""

    def __call__(self, **options: Any) -> Engine:
        engine = self.make(**{"visibility_timeout": LEASE, **options})
        self._made.append(engine)
        return engine

    def mortal(self, **options: Any) -> Mortal:
        mortal = self.make_mortal(**{"visibility_timeout": LEASE, **options})
        self._mortals.append(mortal)
        return mortal

    def close(self) -> None:
        for mortal in self._mortals:
            mortal.die()
        for engine in self._made:
            engine.close()

    def nothing(self, consumer: Consumer) -> None:
        """Fails when `consumer` gets something."""
        assert consumer.receive(self.quiet, 10) == []

    def recovered(self, consumer: Consumer, count: int, lease: float = LEASE) -> list[Delivery]:
        """What comes back after a death: `count` deliveries within the lease and a margin."""
        self.advance(lease)
        return drain(consumer, count, timeout=MARGIN)


def name(start: str = "q") -> str:
    """A queue name that no other test uses."""
    return f"{start}-{uuid.uuid4().hex[:12]}"


def messages(*bodies: bytes | str, **fields: Any) -> list[Message]:
    return [Message(body if isinstance(body, bytes) else body.encode(), **fields) for body in bodies]


def bodies(found: Iterable[Any]) -> list[str]:
    """Bodies as text, of deliveries, dead letters, delayed messages or messages."""
    plain = [getattr(each, "message", each) for each in found]
    return [each.body.decode() for each in plain]


def drain(consumer: Consumer, count: int, timeout: float = SOON) -> list[Delivery]:
    """Receive until `count` deliveries came or the time is over; never more than `count`."""
    got: list[Delivery] = []
    deadline = time.monotonic() + timeout
    while len(got) < count and (left := deadline - time.monotonic()) > 0:
        got += consumer.receive(min(left, 1.0), count - len(got))
    return got


def loop(consumer: Consumer, count: int, timeout: float = SOON) -> list[Delivery]:
    """As `drain`, driven as an event loop does it: `receive(0)`, then wait for a source or for `due`."""
    got: list[Delivery] = []
    deadline = time.monotonic() + timeout
    while True:
        got += consumer.receive(0, count - len(got))
        left = deadline - time.monotonic()
        if len(got) >= count or left <= 0:
            return got
        due = consumer.due()
        select.select(list(consumer.sources()), [], [], left if due is None else min(left, due))


def hear(subscription: Subscription, count: int, timeout: float = SOON) -> list[tuple[str, str, Message]]:
    got: list[tuple[str, str, Message]] = []
    deadline = time.monotonic() + timeout
    while len(got) < count and (left := deadline - time.monotonic()) > 0:
        got += subscription.receive(min(left, 1.0))
    return got


def until(condition: Callable[[], bool], timeout: float = SOON) -> None:
    """Wait until `condition` holds; fails when it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def acked(consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
    """Ack all and send it."""
    for delivery in deliveries:
        consumer.ack(delivery)
    consumer.receive(0, 0)
