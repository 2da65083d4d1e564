"""The Lua scripts of `lua/`, one file an operation: EVALSHA with its hash, loaded again where the server lost it."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files

from .resp import Word, pack, pack_words


class Script:
    """Source and hash of one operation. Lines `-- include NAME` are replaced by `lua/NAME.lua`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.source = _source(name)
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.load = pack("SCRIPT", "LOAD", self.source)

    def call(self, keys: list[str], *args: Word) -> bytes:
        """The packed EVALSHA."""
        return pack("EVALSHA", self.sha, len(keys), *keys, *args)

    def prepared(self, keys: list[str], *args: Word) -> tuple[int, bytes]:
        """(count of words, packed words) of an EVALSHA to which more arguments follow."""
        return 3 + len(keys) + len(args), pack_words("EVALSHA", self.sha, len(keys), *keys, *args)


def _source(name: str) -> bytes:
    text = (files(__package__) / "lua" / f"{name}.lua").read_text("utf-8")
    text = re.sub(r"^-- include (\w+)$", lambda found: _source(found[1]).decode(), text, flags=re.M)
    return text.encode()


@cache
def script(name: str) -> Script:
    return Script(name)
