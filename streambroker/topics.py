"""Topic patterns: words between dots, `*` is exactly one word, `#` any number of them, also none."""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    # every word of the key is read with a dot before it, so that `a.#` covers `a` and `#.a` covers `a`
    parts = [r"(?:\.[^.]*)*" if word == "#" else r"\.[^.]*" if word == "*" else r"\." + re.escape(word)
             for word in pattern.split(".")]
    return re.compile("".join(parts), re.DOTALL)


def matches(pattern: str, key: str) -> bool:
    """Whether `key` is covered. An empty pattern covers every key."""
    return not pattern or pattern == key or _compile(pattern).fullmatch("." + key) is not None
