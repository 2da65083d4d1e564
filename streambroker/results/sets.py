"""Sets of values under one name: the parts of something that is done when all of them are there.

One message a member: adding one reads and rewrites nothing, and adding it again changes nothing.
"""

from __future__ import annotations

from .store import Conflict, ResultStore


class ResultSet:
    """One set. Methods raise what those of ResultStore do. `expires` is the life of each member in seconds."""

    def __init__(self, store: ResultStore, name: str, *, expires: float | None = None) -> None:
        self._store = store
        self._name = name
        self._expires = expires
        self._all = store.stream.members(name)

    def add(self, member: str, value: bytes) -> int:
        """Its sequence; 0 when it was there already, with a value that it keeps."""
        try:
            return self._store.put_at(self._store.stream.member(self._name, member), value, expires=self._expires,
                                      expected=0)
        except Conflict:
            return 0

    def discard(self, member: str) -> None:
        self._store.purge([self._store.stream.member(self._name, member)])

    def count(self) -> int:
        """How many members there are, all of those among them whose `add` has returned. The server looks at each."""
        stream = self._store.stream
        return self._store.ask(lambda: [(stream.count(self._all),
                                         lambda reply: int(stream.check("counting", reply).get("total", 0)))])[0]

    def values(self) -> list[bytes]:
        """In the order of the members' names."""
        subjects = self._store.subjects_at(self._all)
        return [found.value for found in self._store.get_at(subjects) if found is not None]

    def clear(self) -> None:
        self._store.purge([self._all])
