"""Copies of the rows of shared tables. A row is the last message of its subject; a removed one is an empty message,
which goes after a while. The sequence of the last message of all is the version.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from .link import Frame
from .stored import Stored, ask, get, get_all, subjects
from .streams import MESSAGE_TTL

if TYPE_CHECKING:
    from .engine import JetStreamEngine

#: how long removed rows are kept so that copies which are looked at now and then learn of them (seconds)
REMOVED = 120.0
#: a row is removed only as it was seen
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
#: more changes than this are read as a whole
STEPS = 40


class Row(NamedTuple):
    """`queue` is the transient queue that it goes with. A removed row has no key."""

    key: str | None
    value: str
    queue: str
    sequence: int
    time: float


@dataclass(frozen=True)
class View:
    """Rows by subject. `seen` is the monotonic time of the last look, `version` sequence and time of the last change,
    `created` tells one stream of that name from the next."""

    seen: float = float("-inf")
    version: tuple[int, float] = (0, 0.0)
    created: str = ""
    rows: Mapping[str, Row] = field(default_factory=dict)


class Rows:
    """Those whose subjects `covered` covers. The view is replaced as a whole, never changed; any thread may read it."""

    def __init__(self, engine: JetStreamEngine, covered: str) -> None:
        self._engine = engine
        self._covered = covered
        self.view = View()

    @property
    def _stream(self) -> str:
        return self._engine.names.state

    async def look(self) -> View:
        """The rows as they are now; in the link's thread. Raises StoreError, StoreConnectionError."""
        view, now = self.view, time.monotonic()
        last = await get(self._engine, self._stream, {"last_by_subj": self._covered})
        version = (0, 0.0) if last is None else (last.sequence, last.time)
        if now - view.seen > REMOVED / 2:
            # a removed row may have come and gone meanwhile
            view = await self._whole(version)
        elif version != view.version:
            view = await self._changes(view, last) if last is not None else await self._whole(version)
        # a look of another thread may have begun later and ended earlier
        if now >= self.view.seen:
            self.view = replace(view, seen=now)
        return self.view

    def forget(self, removed: Collection[str]) -> None:
        """Rows that are gone for good, by subject."""
        self.view = replace(self.view, rows={subject: row for subject, row in self.view.rows.items()
                                             if subject not in removed})

    async def _changes(self, view: View, last: Stored) -> View:
        if last.sequence <= view.version[0] or await self._created() != view.created:
            return await self._whole((last.sequence, last.time))
        rows = {subject: row for subject, row in view.rows.items()
                if row.key is not None or last.time - row.time < 2 * REMOVED}
        sequence = view.version[0]
        for _ in range(STEPS):
            found = await get(self._engine, self._stream, {"seq": sequence + 1, "next_by_subj": self._covered})
            if found is not None and found.sequence < last.sequence:
                rows[found.subject], sequence = _row(found), found.sequence
                continue
            rows[last.subject] = _row(last)
            return View(view.seen, (last.sequence, last.time), view.created, rows)
        return await self._whole((last.sequence, last.time))

    async def _whole(self, version: tuple[int, float]) -> View:
        """Everything; what changed after `version` is read again by the next look."""
        created = await self._created()
        names = list(await subjects(self._engine, self._stream, self._covered))
        found = await get_all(self._engine, self._stream, [{"last_by_subj": name} for name in names])
        return View(0.0, version, created, {each.subject: _row(each) for each in found if each is not None})

    async def _created(self) -> str:
        info = await ask(self._engine, f"STREAM.INFO.{self._stream}")
        return "" if info is None else str(info["created"])


def _row(stored: Stored) -> Row:
    try:
        found = json.loads(stored.data)
        return Row(str(found["k"]), str(found["v"]), str(found["q"]), stored.sequence, stored.time)
    except (ValueError, KeyError, TypeError):
        return Row(None, "", "", stored.sequence, stored.time)


def row_data(key: str, value: str, queue: str) -> bytes:
    # surrogates in names survive as escapes
    return json.dumps({"k": key, "v": value, "q": queue}, separators=(",", ":")).encode()


def removal(engine: JetStreamEngine, subject: str, sequence: int | None = None) -> Frame:
    """The publish that removes a row; with `sequence` only as long as that is its last change."""
    headers = {} if sequence is None else {EXPECTED: str(sequence)}
    if engine.streams.known_level >= MESSAGE_TTL:
        headers["Nats-TTL"] = f"{REMOVED:.0f}s"
    return Frame(subject, b"", "", headers)
