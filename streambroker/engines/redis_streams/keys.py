"""Every key and channel as a function. All keys of one queue share its hash tag, so that a script has one cluster slot.

| key | type | what |
| --- | --- | --- |
| `<p>:{<queue>}:s:<step>` | stream | ready and unsettled messages of one priority step, group `sb` |
| `<p>:{<queue>}:bell` | list | wakes one idle consumer |
| `<p>:{<queue>}:delay` | zset | messages that wait for their time, by due time in ms |
| `<p>:{<queue>}:back` | string | there while something handed back waits |
| `<p>:{<queue>}:gone:<holder>` | string | a holder that was declared dead and takes nothing under this name |
| `<p>:{<queue>}:trial` | hash | holder -> the last-chance message that it has; `<holder> long` -> a long one |
| `<p>:{<queue>}:dead` | stream | dead letters |
| `<p>:{<queue>}:p:<producer>` | string | last sequence of a producer, for repeated publishes |
| `<p>:{...}:guard` | | never there, see `Keys` |
| `<p>:{@}:...` | | tables, workers and other things that belong to no queue |
"""

from __future__ import annotations

import re
from collections.abc import Sequence

GROUP = "sb"
#: consumer names that no process has: messages to hand out again, and messages on their last allowed delivery
FREE, LAST = "~free", "~last"
#: consumer name of no-ack reads, which leave nothing pending
ONCE = "~once"

_UNSAFE = re.compile(rb"[\x00-\x20%{}\x7f]")


def encode_name(name: str) -> str:
    """A queue name as part of a key: injective, without braces (they would change the hash tag) and blanks."""
    data = name.encode("utf-8", "surrogateescape")
    if data in (b"", b"@"):
        return "%" if not data else "%40"
    return _UNSAFE.sub(lambda found: b"%%%02X" % found[0][0], data).decode("utf-8", "surrogateescape")


class Keys:
    """Key names under one prefix. `database` only matters for channels, which servers share between databases.

    `guarded`: for a cluster. A slot moves to another node key by key, and a script that finds only some of its keys
    would take the others for missing. So each script that touches keys which it does not name gets one more, a guard,
    that never exists: the nodes refuse it (TRYAGAIN) until the whole slot has moved.
    """

    def __init__(self, prefix: str, database: int = 0, *, guarded: bool = False) -> None:
        self.prefix = prefix
        self._guarded = guarded
        self._common = f"{prefix}:{{@}}"
        self._channels = f"{prefix}/{database}"

    def root(self, queue: str) -> str:
        return f"{self.prefix}:{{{encode_name(queue)}}}"

    def whole(self, queue: str) -> list[str]:
        """KEYS of a script over everything of one queue."""
        root = self.root(queue)
        return [root, f"{root}:guard"] if self._guarded else [root]

    def scopes(self, queues: Sequence[str]) -> list[tuple[Sequence[str], list[str]]]:
        """Queues that one script may read, and its KEYS: their roots in this order, in a cluster one by one."""
        if self._guarded:
            return [([queue], self.whole(queue)) for queue in queues]
        return [(queues, [self.root(queue) for queue in queues])]

    def stream(self, queue: str, step: int) -> str:
        return f"{self.root(queue)}:s:{step}"

    def bell(self, queue: str) -> str:
        return f"{self.root(queue)}:bell"

    def delay(self, queue: str) -> str:
        return f"{self.root(queue)}:delay"

    def dead(self, queue: str) -> str:
        return f"{self.root(queue)}:dead"

    def gone(self, queue: str, holder: str) -> str:
        return f"{self.root(queue)}:gone:{holder}"

    def producer(self, queue: str, producer: str) -> str:
        return f"{self.root(queue)}:p:{producer}"

    @property
    def common(self) -> str:
        return self._common

    @property
    def guard(self) -> list[str]:
        """More KEYS for a script over what belongs to no queue."""
        return [f"{self._common}:guard"] if self._guarded else []

    @property
    def timers(self) -> str:
        return f"{self._common}:timers"

    @property
    def watch(self) -> str:
        """Channel that tells workers of a new one, and that someone has looked for the dead."""
        return f"{self._channels}/workers"

    def owned(self, queue: str) -> str:
        """Set of table rows that go with a transient queue."""
        return f"{self._common}:own:{encode_name(queue)}"

    def alive(self, holder: str) -> str:
        """Channel that a live process is subscribed to."""
        return f"{self._channels}/alive/{holder}"

    def topic(self, topic: str, key: str) -> str:
        return f"{self._channels}/b/{encode_name(topic)}/{key}"

    def topic_pattern(self, topic: str, pattern: str) -> str:
        """A server-side pattern that covers `pattern`; it may cover more, the subscription filters exactly."""
        literal = re.split(r"[*#]", pattern, maxsplit=1)[0] if pattern else ""
        if pattern and literal == pattern:
            tail = literal
        else:
            tail = None
        start = _glob_escape(f"{self._channels}/b/{encode_name(topic)}/")
        if tail is not None:
            return start + _glob_escape(tail)
        # `a.#` also covers the key `a`, so the dot before a wildcard is not part of the fixed beginning
        return start + _glob_escape(literal.rstrip(".")) + "*"


def _glob_escape(text: str) -> str:
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)
