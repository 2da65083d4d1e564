"""What goes on in the demo: the store's counts by the Inspector, what ran by the ledger."""

from __future__ import annotations

import os
import time

from ...engine import Inspector
from .ledger import Ledger
from .screen import Now


class Watch:
    """One thread. `held` are the deliveries (queue, id) that a killed worker left in the store."""

    def __init__(self, inspector: Inspector, ledger: Ledger) -> None:
        self._inspector = inspector
        self._ledger = ledger
        self._holder = ""
        self._killed_at = 0.0
        self.held: set[tuple[str, str]] = set()
        self.recovered: set[tuple[str, str]] = set()
        #: seconds from the kill until others had all of `held`
        self.recovery_seconds: float | None = None

    def consuming(self, groups: set[int]) -> bool:
        """Whether the store knows a worker of each of these process groups."""
        return groups <= {_group(worker.pid) for worker in self._inspector.workers()}

    def holder(self, group: int) -> str:
        """The name under which a process of this group holds deliveries."""
        return next(worker.holder for worker in self._inspector.workers() if _group(worker.pid) == group)

    def killed(self, holder: str) -> None:
        """From now on what `holder` has waits for others."""
        self._holder, self._killed_at = holder, time.monotonic()
        self.held = self._of_the_dead()
        self._look_at_recovery()

    def now(self) -> Now:
        self._ledger.refresh()
        stats = [self._inspector.stats(queue) for queue in self._inspector.queues()]
        jobs = [each for each in stats if each.durable]
        self._look_at_recovery()
        published, ended = self._ledger.runs("published"), self._ledger.runs("end")
        return Now(published=len(published), done=len(published & ended), queued=sum(each.ready for each in jobs),
                   running=sum(each.in_flight for each in jobs) - len(self.held - self.recovered),
                   delayed=sum(each.delayed for each in jobs), held=len(self.held), recovered=len(self.recovered))

    def _look_at_recovery(self) -> None:
        if self._holder and self.recovery_seconds is None:
            self.recovered = self.held - self._of_the_dead()
            if self.recovered == self.held:
                self.recovery_seconds = time.monotonic() - self._killed_at

    def _of_the_dead(self) -> set[tuple[str, str]]:
        return {(queue, delivery.id) for queue in self._inspector.queues()
                for delivery in self._inspector.in_flight(queue) if delivery.holder == self._holder}


def _group(pid: int) -> int:
    """0 when it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
