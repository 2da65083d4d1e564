"""Looking at queues and steering them, for tools."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...message import DeadLetter, Delayed, Holding, InFlight, Message, QueueStats, Worker
from .api import ApiError
from .census import Census, Held
from .delays import due_of, job_of, late_filter, mark, scheduled_filter
from .envelope import Envelope, decode
from .graves import queue_in, read_grave, replay_frame
from .purge import drop_oldest, purge_ready
from .stored import Stored, ask, ask_all, get_all, run, subjects, walk
from .streams import NANO

if TYPE_CHECKING:
    from .engine import JetStreamEngine

T = TypeVar("T")

#: a schedule as an id: its subject below the queue
_SCHEDULED = re.compile(r"\d+\.[0-9a-f]{16}\.[A-Za-z0-9_=-]+")
#: names or ids in one request
PAGE = 500
#: more jobs than this are looked up in one list of all that wait
FEW = 20
#: what is due is on its way, and in both places for a moment: pauses before it is looked at again (seconds)
BRINGING = (0.01, 0.03, 0.06)
#: how long a look at the dead letters waits for our own that are on their way (seconds)
SETTLING = 0.5
#: unsettled messages among which the oldest ready one is looked for
DEPTH = 1000


class JetStreamInspector:
    """See `streambroker.engine.Inspector`."""

    def __init__(self, engine: JetStreamEngine) -> None:
        self._engine = engine
        self._names = engine.names

    # ------------------------------------------------------------------ queues
    def queues(self) -> list[str]:
        known = self._engine.queues
        return sorted({*known.table.rows(), *self._run(known.transient_names), *self._run(self._seen)})

    async def _seen(self) -> set[str]:
        """Queues that hold something."""
        engine, names = self._engine, self._names
        found: set[str] = set()
        for stream in await self._work_streams():
            for kind in ("q", "d"):
                found.update(self._queues_of(await subjects(engine, stream, f"{names.root}.{kind}.>")))
        found.update(self._queues_of(await subjects(engine, names.late, f"{names.root}.l.>")))
        graves = await subjects(engine, names.dead, f"{names.root}.x.*")
        found.update(self._queues_of(graves))
        hashed = [{"last_by_subj": subject} for subject in graves if names.queue_of(subject) is None]
        found.update(queue for stored in await get_all(engine, names.dead, hashed)
                     if stored is not None and (queue := queue_in(stored)) is not None)
        return found

    def _queues_of(self, found: Collection[str]) -> set[str]:
        return {queue for subject in found if (queue := self._names.queue_of(subject)) is not None}

    async def _work_streams(self) -> list[str]:
        """The stream of all queues, or those of each."""
        names = self._names
        if not self._engine.settings.stream_per_queue:
            return [names.main]
        found: list[str] = []
        while True:
            page = await ask(self._engine, "STREAM.NAMES", {"subject": f"{names.root}.q.>", "offset": len(found)})
            more = (page or {}).get("streams") or []
            found += more
            if not more or len(found) >= int((page or {}).get("total", 0)):
                return [stream for stream in found if stream.startswith(f"{names.main}_q_")]

    # ------------------------------------------------------------------ numbers
    def stats(self, queue: str) -> QueueStats:
        durable = self._durable(queue)
        held = self._held(queue, self._engine.census())
        flight = sum(len(rows) for rows in held.values())
        stored, delayed, due, dead = self._run(partial(self._count, queue, durable))
        sequences = {row.sequence for rows in held.values() for row in rows}
        ready = max(0, stored - flight) + due
        oldest = self._run(partial(self._oldest, queue, durable, sequences)) if stored > flight else None
        holders = tuple(Holding(name, len(rows), max(row.age for row in rows), max(row.count for row in rows))
                        for name, rows in sorted(held.items()))
        return QueueStats(queue, ready, delayed, flight, dead, oldest, durable, holders)

    def ready(self, queue: str) -> int:
        """What `stats` says, at less cost."""
        durable = self._durable(queue)
        flight = sum(len(rows) for rows in self._held(queue, self._engine.census()).values())
        stored, late = self._run(partial(self._count_ready, queue, durable))
        return max(0, stored - flight) + self._due(late)

    async def _count(self, queue: str, durable: bool) -> tuple[int, int, int, int]:
        """(ready or in flight, delayed, due and not brought yet, dead)."""
        engine, names = self._engine, self._names
        (stored, late), scheduled, dead = await asyncio.gather(
            self._count_ready(queue, durable),
            subjects(engine, names.stream(queue), scheduled_filter(names, queue)),
            subjects(engine, names.dead, names.grave(queue)))
        due = self._due(late)
        return stored, sum(scheduled.values()) + sum(late.values()) - due, due, sum(dead.values())

    async def _count_ready(self, queue: str, durable: bool) -> tuple[int, dict[str, int]]:
        """(ready or in flight, what waits for the relay by subject)."""
        for pause in (*BRINGING, None):
            stored, late = await asyncio.gather(
                subjects(self._engine, *self._ready(queue, durable)),
                subjects(self._engine, self._names.late, late_filter(self._names, queue)))
            if pause is None or not self._due(late):
                break
            await asyncio.sleep(pause)
        return sum(stored.values()), late

    def _due(self, late: Mapping[str, int]) -> int:
        now = self._engine.streams.now()
        return sum(count for subject, count in late.items() if due_of(subject) <= now)

    def _ready(self, queue: str, durable: bool) -> tuple[str, str]:
        """(stream, filter) of what is ready or in flight."""
        names = self._names
        return ((names.stream(queue), names.ready(queue, "*")) if durable
                else (names.transient, names.brief(queue, "*")))

    async def _oldest(self, queue: str, durable: bool, held: set[int]) -> float | None:
        """Age of the oldest message that nobody has."""
        stream, covered = self._ready(queue, durable)
        starts = [0, *sorted(held)[:DEPTH]]
        found = await get_all(self._engine, stream, [{"seq": start + 1, "next_by_subj": covered} for start in starts])
        free = [each for each in found if each is not None and each.sequence not in held]
        if not free:
            return None
        return max(0.0, self._engine.streams.now() - min(free, key=lambda each: each.sequence).time)

    # ------------------------------------------------------------------ who has what
    def in_flight(self, queue: str, limit: int = 1000) -> list[InFlight]:
        found = [InFlight(queue, row.id, name, row.age, row.count)
                 for name, rows in self._held(queue, self._engine.census()).items() for row in rows]
        return sorted(found, key=lambda row: -row.age)[:limit]

    @staticmethod
    def _held(queue: str, census: list[Census]) -> dict[str, list[Held]]:
        held = {each.holder: [row for row in each.held if row.queue == queue] for each in census}
        return {name: rows for name, rows in held.items() if rows}

    def workers(self) -> list[Worker]:
        return [Worker(each.holder, each.host, each.pid, each.queues, each.lease, each.seen)
                for each in self._engine.census()]

    # ------------------------------------------------------------------ dead letters
    def dead(self, queue: str) -> Iterator[DeadLetter]:
        self._engine.settled(SETTLING)
        # the server removes old ones in its own time; how old is for who buries to say, not for who looks
        age = self._run(self._greatest_age)
        oldest = self._engine.streams.now() - age if age else 0.0
        for stored in walk(self._engine, self._names.dead, self._names.grave(queue)):
            if stored.time >= oldest:
                yield read_grave(queue, stored)

    async def _greatest_age(self) -> float:
        """Of dead letters, in seconds; 0 without a limit."""
        try:
            info = await self._engine.api.acall(f"STREAM.INFO.{self._names.dead}")
        except ApiError as error:
            if error.missing:
                return 0.0
            raise
        return int(info["config"].get("max_age", 0)) / NANO

    def dead_remove(self, queue: str, ids: Collection[str]) -> int:
        return self._remove(self._names.dead, self._names.grave(queue), ids)

    def _remove(self, stream: str, subject: str, ids: Collection[str]) -> int:
        return sum(self._run(partial(self._remove_page, stream, subject, page)) for page in _pages(sorted(set(ids))))

    async def _remove_page(self, stream: str, subject: str, ids: Collection[str]) -> int:
        """Remove messages by sequence, if they are on that subject or below it."""
        there = [each for each in await self._find(stream, ids) if (each.subject + ".").startswith(subject + ".")]
        answers = await ask_all(self._engine, f"STREAM.MSG.DELETE.{stream}",
                                [{"seq": each.sequence, "no_erase": True} for each in there])
        return sum(answer is not None and bool(answer.get("success")) for answer in answers)

    async def _find(self, stream: str, ids: Collection[str]) -> list[Stored]:
        sequences = sorted({int(each) for each in ids if each.isascii() and each.isdigit() and len(each) < 19})
        found = await get_all(self._engine, stream, [{"seq": sequence} for sequence in sequences])
        return [each for each in found if each is not None]

    def replay(self, queue: str, ids: Collection[str]) -> int:
        """Each is stored in its queue before it is removed here; the server recognizes a repetition of the first half
        for `duplicate_window` seconds."""
        return sum(self._replay_page(queue, page) for page in _pages(sorted(set(ids))))

    def _replay_page(self, queue: str, ids: Collection[str]) -> int:
        stream, subject = self._names.dead, self._names.grave(queue)
        letters = [each for each in self._run(partial(self._find, stream, ids)) if each.subject == subject]
        if not letters:
            return 0
        self._engine.publish_again(queue, [replay_frame(self._engine, queue, each) for each in letters])
        return self._remove(stream, subject, [str(each.sequence) for each in letters])

    # ------------------------------------------------------------------ what waits for its time
    def delayed(self, queue: str) -> Iterator[Delayed]:
        names = self._names
        for stored in walk(self._engine, names.stream(queue), scheduled_filter(names, queue)):
            envelope = self._envelope(stored)
            number = ".".join(stored.subject.split(".")[3:])
            yield Delayed(queue, number, envelope.message, envelope.due / 1000 or stored.time)
        for stored in walk(self._engine, names.late, late_filter(names, queue)):
            yield Delayed(queue, str(stored.sequence), self._envelope(stored).message, due_of(stored.subject))

    def _envelope(self, stored: Stored) -> Envelope:
        try:
            return decode(stored.data)
        except ValueError:
            return Envelope(Message(stored.data, b"{}", "", self._names.step_of(stored.subject)))

    def delayed_remove(self, queue: str, ids: Collection[str]) -> int:
        names = self._names
        start = scheduled_filter(names, queue).removesuffix("*.>")
        covered = [start + each for each in set(ids) if _SCHEDULED.fullmatch(each)]
        late = late_filter(names, queue).removesuffix(".*.>")
        return self._purge(names.stream(queue), covered) + self._remove(names.late, late, ids)

    def drop(self, message_ids: Collection[str], queues: Collection[str] | None = None) -> int:
        """Jobs are found by a part of the subjects of their waiting messages."""
        jobs = {mark(each) for each in message_ids}
        found = self._run(partial(self._waiting, jobs, queues)) if jobs else {}
        return sum(self._purge(stream, covered) for stream, covered in found.items())

    async def _waiting(self, jobs: set[str], queues: Collection[str] | None) -> dict[str, list[str]]:
        """Subjects of the waiting messages of some jobs, by stream."""
        names = self._names
        wanted = jobs if len(jobs) <= FEW else {""}
        found: dict[str, list[str]] = {}
        for queue in [None] if queues is None else queues:
            streams = await self._work_streams() if queue is None else [names.stream(queue)]
            places = [(stream, scheduled_filter(names, queue, job)) for stream in streams for job in wanted]
            places += [(names.late, late_filter(names, queue, job)) for job in wanted]
            for stream, covered in places:
                found.setdefault(stream, []).extend(
                    subject for subject in await subjects(self._engine, stream, covered) if job_of(subject) in jobs)
        return found

    def _purge(self, stream: str, covered: Collection[str]) -> int:
        return sum(self._run(partial(self._purge_page, stream, page)) for page in _pages(list(covered)))

    async def _purge_page(self, stream: str, covered: Collection[str]) -> int:
        answers = await ask_all(self._engine, f"STREAM.PURGE.{stream}", [{"filter": each} for each in covered])
        return sum(int(answer.get("purged", 0)) for answer in answers if answer is not None)

    # ------------------------------------------------------------------ purging
    def purge(self, queue: str) -> int:
        names, durable = self._names, self._durable(queue)
        removed = (self._purge(names.stream(queue), [scheduled_filter(names, queue)])
                   + self._purge(names.late, [late_filter(names, queue)]))
        while count := self._run(partial(purge_ready, self._engine, queue, durable=durable)):
            removed += count
        return removed

    def drop_oldest(self, queue: str, count: int) -> int:
        """Remove so many ready messages, the oldest first, never unsettled ones; how many there were."""
        return self._run(partial(drop_oldest, self._engine, queue, count, durable=self._durable(queue)))

    def _durable(self, queue: str) -> bool:
        spec = self._engine.spec(queue)
        return spec is None or spec.durable

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return run(self._engine, work)


def _pages(wanted: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(wanted), PAGE):
        yield wanted[start:start + PAGE]
