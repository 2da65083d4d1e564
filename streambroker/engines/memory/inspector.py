"""Looking and steering; see `streambroker.engine.Inspector`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from ...message import DeadLetter, Delayed, Holding, InFlight, QueueSpec, QueueStats, Worker
from .queue import Queue

if TYPE_CHECKING:
    from .engine import MemoryEngine


class MemoryInspector:
    """Reads the model as it is now."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def queues(self) -> list[str]:
        with self._engine.turn() as store:
            return sorted({*store.queues, *store.graves})

    def stats(self, queue: str) -> QueueStats:
        with self._engine.turn() as store:
            dead = len(store.graves.get(queue, ()))
            found = store.queues.get(queue)
            if found is None:
                return QueueStats(queue, ready=0, delayed=0, in_flight=0, dead=dead)
            holders = tuple(
                Holding(holder.name, len(held), store.now - min(entry.since for entry in held),
                        max(entry.count for entry in held))
                for holder, held in sorted(found.held.items(), key=lambda item: item[0].name))
            return QueueStats(
                queue, ready=len(found.ready), delayed=len(found.delayed),
                in_flight=sum(each.count for each in holders), dead=dead,
                oldest_age=max((store.now - entry.entered for entry in found.ready), default=None),
                durable=found.spec.durable, holders=holders)

    def in_flight(self, queue: str, limit: int = 1000) -> list[InFlight]:
        with self._engine.turn() as store:
            found = store.queues.get(queue)
            entries = sorted(found.unsettled(), key=lambda entry: entry.since) if found else []
            return [InFlight(queue, entry.id, entry.holder.name, store.now - entry.since, entry.count)
                    for entry in entries[:limit] if entry.holder]

    def workers(self) -> list[Worker]:
        with self._engine.turn() as store:
            return [Worker(holder.name, holder.host, holder.pid, tuple(sorted(holder.consuming)),
                           holder.settings.visibility_timeout,
                           0.0 if holder.died is None else store.now - holder.died)
                    for holder in store.holders if holder.consuming]

    def dead(self, queue: str) -> Iterator[DeadLetter]:
        with self._engine.turn() as store:
            return iter([grave.letter for grave in store.graves.get(queue, {}).values()])

    def dead_remove(self, queue: str, ids: Collection[str]) -> int:
        with self._engine.turn() as store:
            graves = store.graves.get(queue, {})
            return sum(graves.pop(each, None) is not None for each in set(ids))

    def replay(self, queue: str, ids: Collection[str]) -> int:
        with self._engine.turn() as store:
            wanted = set(ids)
            graves = [grave for key, grave in store.graves.get(queue, {}).items() if key in wanted]
            if graves and queue not in store.queues:
                store.declare(QueueSpec(queue))
            for grave in graves:
                store.replay(grave)
            return len(graves)

    def delayed(self, queue: str) -> Iterator[Delayed]:
        with self._engine.turn() as store:
            found = store.queues.get(queue)
            return iter([Delayed(queue, entry.id, entry.message, store.wall + due)
                         for due, _, entry in (sorted(found.delayed, key=lambda item: item[:2]) if found else ())])

    def delayed_remove(self, queue: str, ids: Collection[str]) -> int:
        wanted = set(ids)
        with self._engine.turn() as store:
            found = store.queues.get(queue)
            return found.drop_delayed(lambda entry: entry.id in wanted) if found else 0

    def drop(self, message_ids: Collection[str], queues: Collection[str] | None = None) -> int:
        wanted = set(message_ids)
        with self._engine.turn() as store:
            found = [queue for name, queue in store.queues.items() if queues is None or name in queues]
            return sum(queue.drop_delayed(lambda entry: entry.message.id in wanted) for queue in found)

    def purge(self, queue: str) -> int:
        with self._engine.turn() as store:
            found: Queue | None = store.queues.get(queue)
            if found is None:
                return 0
            count = found.waiting()
            found.keep(lambda entry: False)
            found.delayed.clear()
            return count
