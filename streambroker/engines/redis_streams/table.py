"""Small shared tables: a hash with a version; processes keep a copy and look whether the version moved."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from .commands import Commands
from .keys import Keys

#: how long an impatient look tries to get over a broken link (seconds)
IMPATIENCE = 1.0


class RedisTable:
    """Thread-safe: the copy is replaced as a whole, never changed."""

    def __init__(self, commands: Commands, keys: Keys, name: str) -> None:
        self._commands = commands
        self._keys = keys
        self._name = name
        self._rows_key = f"{keys.common}:t:{name}"
        self._version_key = f"{keys.common}:v:{name}"
        self._copy: tuple[float, str, Mapping[str, str]] = (float("-inf"), "none", {})

    def rows(self, max_age: float = 0.0, commands: Commands | None = None, *,
             patient: bool = True) -> Mapping[str, str]:
        """See `SharedTable`. `commands`: whose connection is used."""
        seen, version, rows = self._copy
        now = time.monotonic()
        if now - seen < max_age:
            return rows
        reply = (commands or self._commands).script("table_read", [self._rows_key, self._version_key], version,
                                                    patience=None if patient else IMPATIENCE)
        words = [word.decode("utf-8", "surrogateescape") for word in reply]
        if len(words) > 1 or words[0] != version:
            rows = dict(zip(words[1::2], words[2::2], strict=True))
        self._copy = (now, words[0], rows)
        return rows

    def put(self, key: str, value: str, queue: str = "") -> bool:
        owned = self._keys.owned(queue) if queue else self._rows_key
        changed = bool(self._commands.script("table_write", [self._rows_key, self._version_key, owned], "put",
                                             self._name, key, value))
        self._forget(changed)
        return changed

    def delete(self, keys: Collection[str]) -> int:
        if not keys:
            return 0
        removed = int(self._commands.script("table_write", [self._rows_key, self._version_key, self._rows_key],
                                            "delete", self._name, *keys))
        self._forget(removed > 0)
        return removed

    def _forget(self, changed: bool) -> None:
        if changed:
            self._copy = (float("-inf"), *self._copy[1:])
