"""Sets of values under one name: the parts of something that is done when all of them are there.

One message a member: adding one reads and rewrites nothing, and adding it again changes nothing.
"""

from __future__ import annotations

from .store import Conflict, ResultStore, Stored


class ResultSet:
    """One set. Methods raise what those of ResultStore do. `expires` is the life of each member in seconds."""

    def __init__(self, store: ResultStore, name: str, *, expires: float | None = None) -> None:
        self._store = store
        self._name = name
        self._expires = expires
        self._all = store.stream.members(name)

    def add(self, member: str, value: bytes) -> bool:
        """Whether it is new. One that is there keeps its value."""
        try:
            self._store.put_at(self._store.stream.member(self._name, member), value, expires=self._expires, expected=0)
        except Conflict:
            return False
        return True

    def discard(self, member: str) -> None:
        self._store.purge([self._store.stream.member(self._name, member)])

    def count_with(self, key: str) -> tuple[int, Stored | None]:
        """How many members there are, and the value of that key, in one round trip. What an `add` that has returned
        added is counted."""
        stream = self._store.stream
        count, value = self._store.ask(lambda: [
            (stream.count(self._all), lambda reply: stream.check("counting", reply).get("total", 0)),
            (stream.get(stream.value(key)), stream.read)])
        return count, value

    def values(self) -> list[bytes]:
        """In the order of the members' names."""
        subjects = self._store.subjects_at(self._all)
        return [found.value for found in self._store.get_at(subjects) if found is not None]

    def clear(self) -> None:
        self._store.purge([self._all])
