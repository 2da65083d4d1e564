"""The memory engine as engine under test: time is moved, nobody waits."""

from __future__ import annotations

import uuid
from typing import Any

from ...engines.memory import MemoryEngine
from .kit import SOON, Engines, Taken
from .mortal import Holding


class Unbuffered(Holding):
    def flush(self) -> None:
        """The memory engine holds nothing back, and the consumers of a killed one are closed."""


class MemoryMortal:
    """Dies by giving no sign of life any more; a stopped one is the same, and can still try to settle."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine
        self._holding = Unbuffered(engine)
        self._gone = False

    @property
    def holder(self) -> str:
        return self._engine.holder.name

    def take(self, queue: str, limit: int = 10, timeout: float = SOON) -> list[Taken]:
        return self._holding.take(queue, limit, min(timeout, 0.01))

    def settle(self, how: str, *ids: str) -> None:
        self._holding.settle(how, list(ids))

    def stop(self) -> None:
        self.die()

    def resume(self) -> None:
        """It settles all the same."""

    def die(self) -> None:
        if not self._gone:
            self._gone = True
            self._engine.kill()


class MemoryEngines(Engines):
    """One store of its own with a clock that only `advance` moves."""

    quiet = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._url = f"memory://{uuid.uuid4().hex}"
        self._ticker = self._engine()

    def make(self, **options: Any) -> MemoryEngine:
        return self._engine(**options)

    def make_mortal(self, **options: Any) -> MemoryMortal:
        return MemoryMortal(self._engine(**options))

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._ticker.ping()

    def close(self) -> None:
        super().close()
        self._ticker.close()

    def _engine(self, **options: Any) -> MemoryEngine:
        return MemoryEngine.from_url(self._url, clock=lambda: self._now, **options)
