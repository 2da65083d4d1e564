"""A link whose answers are read later: what is expected of it, in order, and until when."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from ...errors import StoreConnectionError
from .link import Link


class Expected(NamedTuple):
    """An answer that will come: `kind` tells what to do with it, `about` what it is about, `late` when the link counts
    as dead without it (monotonic)."""

    kind: str
    about: Any
    late: float


class Pipe:
    """One user at a time. After a StoreConnectionError it is closed, and `abandoned` says what was never answered."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._expected: deque[Expected] = deque()

    @property
    def is_open(self) -> bool:
        return self._link.is_open

    @property
    def quiet(self) -> bool:
        """Nothing is expected."""
        return not self._expected

    def fileno(self) -> int:
        return self._link.fileno()

    def open(self, timeout: float | None = None) -> None:
        self._expected.clear()
        self._link.open(timeout)

    def send(self, parts: list[bytes], expected: list[Expected]) -> None:
        """One write. Raises StoreConnectionError."""
        self._expected.extend(expected)
        self._link.send(parts[0] if len(parts) == 1 else b"".join(parts))

    def poll(self, now: float) -> list[tuple[Expected, Any]]:
        """Answers that have arrived, with what they answer; never waits. Raises StoreConnectionError, also when one is
        late; what arrived before that is lost with it."""
        if not self._expected or not self._link.is_open:
            return []
        answers = [(self._expected.popleft(), reply) for reply in self._link.poll()]
        if self._expected and now >= self._expected[0].late:
            self._link.close()
            raise StoreConnectionError("no answer in time")
        return answers

    def due(self, now: float) -> float | None:
        """Seconds until the next answer is late."""
        return max(0.0, self._expected[0].late - now) if self._expected else None

    def abandoned(self, kind: str) -> list[Any]:
        """What unanswered requests of a kind were about."""
        return [expected.about for expected in self._expected if expected.kind == kind]

    def close(self) -> None:
        self._link.close()

    def forget(self) -> None:
        self._expected.clear()

    def abandon(self) -> None:
        self._link.abandon()
        self._expected.clear()
