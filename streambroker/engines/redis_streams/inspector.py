"""Looking at queues and steering them, for tools. Pages everywhere: nothing here keeps the server busy for long."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ...message import DeadLetter, Delayed, Holding, InFlight, Message, QueueStats, Worker
from .keys import FREE, GROUP, LAST
from .publisher import decode
from .resp import ReplyError, pack, text_of
from .scripts import script

if TYPE_CHECKING:
    from .engine import RedisStreamsEngine

_MEMBER = re.compile(rb"([^\n]*)\n([^\n]*)\n(\d+)\n(\d+)\n(\d+)\n", re.DOTALL)
PAGE = 500


class RedisInspector:
    """See `streambroker.engine.Inspector`."""

    def __init__(self, engine: RedisStreamsEngine) -> None:
        self._engine = engine
        self._commands = engine.commands

    def queues(self) -> list[str]:
        return self._engine.queues.names()

    def stats(self, queue: str) -> QueueStats:
        engine = self._engine
        engine.queues.learn_options(queue)
        ready, flight, delayed, dead, oldest, *pairs = self._commands.script(
            "size", engine.keys.whole(queue), GROUP, engine.ttl_of(queue), *engine.steps)
        counts: dict[str, int] = {}
        for name, count in zip(pairs[::2], pairs[1::2], strict=True):
            counts[text_of(name)] = counts.get(text_of(name), 0) + count
        rows = self.in_flight(queue, 10_000) if counts else []
        holders = []
        for name, count in sorted(counts.items()):
            own = [row for row in rows if row.holder == name]
            holders.append(Holding(name, count, max((row.age for row in own), default=0.0),
                                   max((row.count for row in own), default=1)))
        spec = engine.spec(queue)
        return QueueStats(queue, ready, delayed, flight, dead, None if oldest < 0 else oldest / 1000,
                          spec is None or spec.durable, tuple(holders))

    def in_flight(self, queue: str, limit: int = 1000) -> list[InFlight]:
        engine = self._engine
        rows: list[InFlight] = []
        for step in engine.steps:
            start = "-"
            while len(rows) < limit:
                stream = engine.keys.stream(queue, step)
                page = self._commands.many([pack("XPENDING", stream, GROUP, start, "+", PAGE)])[0]
                if isinstance(page, ReplyError) or not page:
                    break
                for entry, holder, idle, count in page:
                    if holder not in (FREE.encode(), LAST.encode()):
                        rows.append(InFlight(queue, f"{step}:{entry.decode()}", text_of(holder), idle / 1000, count))
                start = "(" + page[-1][0].decode()
        return rows[:limit]

    def workers(self) -> list[Worker]:
        return self._engine.registry.workers(self._commands)

    def dead(self, queue: str) -> Iterator[DeadLetter]:
        start = "-"
        while page := self._commands.call("XRANGE", self._engine.keys.dead(queue), start, "+", "COUNT", 50):
            for entry, flat in page:
                yield _dead_letter(queue, entry.decode(), dict(zip(flat[::2], flat[1::2], strict=True)))
            start = "(" + page[-1][0].decode()

    def dead_ones(self, queue: str, ids: Collection[bytes]) -> Iterator[DeadLetter]:
        """Those that are still there."""
        for entry in ids:
            for found, flat in self._commands.call("XRANGE", self._engine.keys.dead(queue), entry, entry):
                yield _dead_letter(queue, found.decode(), dict(zip(flat[::2], flat[1::2], strict=True)))

    def dead_remove(self, queue: str, ids: Collection[str]) -> int:
        return self._in_pages(ids, lambda part: script("dead_remove").call(
            [self._engine.keys.dead(queue)], *part))

    def replay(self, queue: str, ids: Collection[str]) -> int:
        return self._in_pages(ids, lambda part: script("replay").call(self._engine.keys.whole(queue), *part))

    def _in_pages(self, ids: Collection[str], command: Any) -> int:
        wanted = [entry for entry in ids if re.fullmatch(r"\d+-\d+", entry)]
        return sum(int(self._commands.run(command(wanted[start:start + PAGE])))
                   for start in range(0, len(wanted), PAGE))

    def delayed(self, queue: str) -> Iterator[Delayed]:
        for member, due in self._scan(queue):
            found = _MEMBER.match(member)
            nonce, step = (text_of(found[2]), int(found[3])) if found else ("", 0)
            yield Delayed(queue, nonce, _message(member[found.end() if found else 0:], step), due)

    def delayed_remove(self, queue: str, ids: Collection[str]) -> int:
        wanted = {entry.encode("utf-8", "surrogateescape") for entry in ids}
        members = []
        for member, _ in self._scan(queue):
            found = _MEMBER.match(member)
            if found and found[2] in wanted:
                members.append(member)
        return self._remove_members(queue, members)

    def drop(self, message_ids: Collection[str], queues: Collection[str] | None = None) -> int:
        names = [each.replace("\n", " ") for each in message_ids]
        removed = 0
        for queue in (self.queues() if queues is None else queues) if names else ():
            cursor = b"0"
            while True:
                cursor, count = self._commands.script("drop", [self._engine.keys.delay(queue)], cursor, PAGE, *names)
                removed += int(count)
                if cursor == b"0":
                    break
        return removed

    def _scan(self, queue: str) -> Iterator[tuple[bytes, float]]:
        cursor, seen = b"0", set()
        while True:
            cursor, flat = self._commands.call("ZSCAN", self._engine.keys.delay(queue), cursor, "COUNT", 1000)
            for member, score in zip(flat[::2], flat[1::2], strict=True):
                mark = hash(member)
                if mark not in seen:
                    seen.add(mark)
                    yield member, float(score) / 1000
            if cursor == b"0":
                return

    def _remove_members(self, queue: str, members: list[bytes]) -> int:
        key = self._engine.keys.delay(queue)
        return sum(int(self._commands.call("ZREM", key, *members[start:start + PAGE]))
                   for start in range(0, len(members), PAGE))

    def purge(self, queue: str) -> int:
        removed = 0
        while True:
            count, more = self._commands.script("purge", self._engine.keys.whole(queue), GROUP, 1000,
                                                *self._engine.steps)
            removed += int(count)
            if not more:
                return removed


def _message(data: bytes, step: int) -> Message:
    try:
        return decode(data, step)
    except ValueError:
        return Message(data, b"{}", "", step)


def _dead_letter(queue: str, entry: str, fields: dict[bytes, bytes]) -> DeadLetter:
    def number(name: bytes) -> int:
        value = fields.get(name, b"0")
        return int(value) if value.isdigit() and len(value) < 16 else 0

    raw = {name.decode("utf-8", "replace"): value for name, value in fields.items() if not name.startswith(b"~")}
    return DeadLetter(
        queue, entry, _message(fields.get(b"m", b""), number(b"~step")),
        fields.get(b"~reason", b"").decode("utf-8", "replace"), number(b"~count"), number(b"~first") / 1000,
        number(b"~last") / 1000, fields.get(b"~holder", b"").decode("utf-8", "replace"), {} if b"m" in fields else raw)
