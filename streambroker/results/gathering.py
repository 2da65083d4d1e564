"""Parts that come from anywhere, and somebody's turn when all are there: the head of a chord, a group with a callback.

Each part is a message of its own. What else is to be known is one small record, changed by compare-and-set, so that
one part alone gets the turn. When its worker dies in the middle, the same part, delivered again, gets it again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from .sets import ResultSet
from .store import Conflict, ResultStore


@dataclass(frozen=True)
class _Record:
    """`size` is None before `begin`, `more` what was added to it, `turn` the part that has the turn. At most `seen`
    parts have a sequence up to `at`."""

    size: int | None = None
    more: int = 0
    seen: int = 0
    at: int = 0
    turn: str = ""
    done: bool = False

    @classmethod
    def read(cls, value: bytes | None) -> _Record:
        return cls(**json.loads(value)) if value else cls()

    @property
    def total(self) -> int:
        return (self.size or 0) + self.more

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True)
class Turn:
    """The right to go on with all parts; `sequence` is that of the record which says so."""

    part: str
    sequence: int


class Gathering:
    """One gathering. Everything about it is forgotten `expires` seconds after its last change, 0: never. Methods raise
    what those of ResultStore do, and may be repeated."""

    def __init__(self, store: ResultStore, name: str, expires: float) -> None:
        self._store = store
        self._key = f"{name}-parts"
        self._expires = expires
        self._parts = ResultSet(store, name, expires=expires)

    def begin(self, size: int) -> None:
        """So many parts will come. To be called before the last of them can; again for another round."""
        def change(value: bytes | None) -> bytes:
            old = _Record.read(value)
            return _Record(size, 0 if old.done else old.more).encode()

        self._store.update(self._key, change, expires=self._expires)

    def enlarge(self) -> None:
        """One part more."""
        def change(value: bytes | None) -> bytes:
            old = _Record.read(value)
            return replace(old, more=old.more + 1).encode()

        self._store.update(self._key, change, expires=self._expires)

    def arrive(self, part: str, value: bytes) -> Turn | None:
        """Add a part, which keeps its first value when it comes again. The turn when all are there and nobody else has
        it; it must be ended by `finish`."""
        sequence = self._parts.add(part, value)
        while True:
            found = self._store.get(self._key)
            record = _Record.read(found.value if found else None)
            if record.done:
                self._parts.discard(part)
                return None
            if found is None or record.size is None or record.turn not in ("", part):
                return None
            # the last one has all others before it: while fewer messages than parts that were missing have come since
            # somebody counted, this is not the last. So a thousand parts are counted some ten times.
            if sequence and sequence - record.at < record.total - record.seen:
                return None
            seen = self._parts.count()
            if seen < record.total:
                if sequence:
                    self._write(replace(record, seen=seen, at=sequence), found.sequence)
                return None
            turn = self._write(replace(record, turn=part), found.sequence)
            if turn is not None:
                return turn

    def values(self) -> list[bytes]:
        """Of all parts, in the order of their names."""
        return self._parts.values()

    def renew(self, turn: Turn) -> Turn | None:
        """The turn anew just before it is used; None when the part, delivered again, has it elsewhere."""
        found = self._store.get(self._key)
        if found is None or found.sequence != turn.sequence:
            return None
        return self._write(_Record.read(found.value), turn.sequence)

    def finish(self, turn: Turn) -> None:
        """All is done: parts that come again have no effect."""
        if self._write(_Record(turn=turn.part, done=True), turn.sequence) is not None:
            self._parts.clear()

    def _write(self, record: _Record, sequence: int) -> Turn | None:
        try:
            return Turn(record.turn, self._store.put(self._key, record.encode(), expires=self._expires,
                                                     expected=sequence))
        except Conflict:
            return None
