"""Every stream, consumer and subject as a function. `<p>` is the prefix as a token, `<q>` a queue as a token.

| subject | stream | what |
| --- | --- | --- |
| `<p>.q.<q>.<step>` | `<p>` (or `<p>_q_<q>` with `stream_per_queue`), work queue | ready and unsettled messages |
| `<p>.d.<q>.<step>.<id>` | the same | messages that wait for their time, by the server's schedules (2.12 and later) |
| `<p>.t.<q>.<step>` | `<p>_tmp`, interest | messages of transient queues, which are consumers of this stream |
| `<p>.l.<q>.<step>` | `<p>_late`, work queue | delayed messages of older servers and transient queues |
| `<p>.x.<q>` | `<p>_dead`, limits | dead letters |
| `<p>.s.<table>.<row>` | `<p>_state`, last of each subject | rows of shared tables |
| `<p>.b.<stream>.<seq>` | `<p>_state` | the book of one message: what the server's delivery count does not tell |
| `<p>.w.<holder>` | `<p>_held`, last of each subject | what a process holds, its sign of life |
| `<p>.p.<holder>` | none | asks one process whether it is there, and what it holds now |
| `<p>.n` | none | tells of joins, departures, new priority steps and durables that were made anew |
| `<p>.f.<topic>.<key>` | none | broadcasts |
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_STREAM = re.compile(r"_(tmp|late|dead|state|held)$|_q_")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")
#: longer tokens are cut and hashed: servers make folders of them
LONGEST = 160


@lru_cache(4096)
def token(name: str) -> str:
    """A name as one token of a subject, injective. One of over `LONGEST` characters cannot be read back."""
    data = name.encode("utf-8", "surrogateescape")
    safe = _UNSAFE.sub(lambda found: b"=%02X" % found[0][0], data).decode("ascii") or "="
    if len(safe) > LONGEST:
        return f"{safe[:LONGEST - 44]}=Z{hashlib.sha256(data).hexdigest()[:42]}"
    return safe


def readable(name: str) -> bool:
    """Whether `untoken` gives the name back."""
    return "=Z" not in token(name)


def untoken(text: str) -> str | None:
    """The name of a token; None when it was hashed."""
    if "=Z" in text:
        return None
    if text == "=":
        return ""
    data = _ESCAPED.sub(lambda found: bytes([int(found[1], 16)]), text.encode("ascii", "replace"))
    return data.decode("utf-8", "surrogateescape")


class Names:
    """Names under one prefix."""

    def __init__(self, prefix: str, stream_per_queue: bool = False) -> None:
        root = token(prefix)
        # no prefix is another one's stream
        self.root = root.replace("_", "=5F") if _STREAM.search(root) else root
        self._own = stream_per_queue
        self.main = self.root
        self.transient = f"{self.root}_tmp"
        self.late = f"{self.root}_late"
        self.dead = f"{self.root}_dead"
        self.state = f"{self.root}_state"
        self.held = f"{self.root}_held"
        self.news = f"{self.root}.n"
        self._start = len(self.root) + 1

    # Streams and their subjects

    def stream(self, queue: str) -> str:
        return f"{self.main}_q_{token(queue)}" if self._own else self.main

    def work_subjects(self, queue: str) -> list[str]:
        """Subjects of the stream of `queue`."""
        part = token(queue) if self._own else "*"
        return [f"{self.root}.q.{part}.*", f"{self.root}.d.{part}.>"]

    # Subjects

    def ready(self, queue: str, step: int | str) -> str:
        return f"{self.root}.q.{token(queue)}.{step}"

    def scheduled(self, queue: str, step: int | str, unique: str) -> str:
        return f"{self.root}.d.{token(queue)}.{step}.{unique}"

    def brief(self, queue: str, step: int | str) -> str:
        return f"{self.root}.t.{token(queue)}.{step}"

    def lately(self, queue: str, step: int | str) -> str:
        return f"{self.root}.l.{token(queue)}.{step}"

    def grave(self, queue: str) -> str:
        return f"{self.root}.x.{token(queue)}"

    def row(self, table: str, key: str) -> str:
        return f"{self.root}.s.{token(table)}.{token(key)}"

    def rows(self, table: str = "") -> str:
        """Covers the rows of one table, or of all."""
        return f"{self.root}.s.{token(table) if table else '*'}.*"

    def book(self, stream: str, sequence: int) -> str:
        return f"{self.root}.b.{stream}.{sequence}"

    def books(self) -> str:
        """Covers all of them."""
        return f"{self.root}.b.*.*"

    @staticmethod
    def of_book(subject: str) -> tuple[str, int]:
        """Stream and sequence of the message."""
        stream, sequence = subject.split(".")[-2:]
        return stream, int(sequence)

    def record(self, holder: str) -> str:
        return f"{self.root}.w.{token(holder)}"

    def presence(self, holder: str) -> str:
        return f"{self.root}.p.{token(holder)}"

    def topic(self, topic: str, key: str) -> str:
        return f"{self.root}.f.{token(topic)}.{token(key)}"

    def topic_all(self, topic: str) -> str:
        return f"{self.root}.f.{token(topic)}.*"

    # Consumers

    def durable(self, queue: str, step: int) -> str:
        return f"{token(queue)}_{step}"

    def transient_durable(self, queue: str) -> str:
        return token(queue)

    def queue_of(self, subject: str) -> str | None:
        """The queue of a q, d, t, l or x subject; None when its token was hashed or it is none of ours."""
        parts = subject[self._start:].split(".")
        return untoken(parts[1]) if len(parts) > 1 else None

    def step_of(self, subject: str) -> int:
        """The step of a q, d, t or l subject; 0 when there is none."""
        parts = subject[self._start:].split(".")
        return int(parts[2]) if len(parts) > 2 and parts[2].isdigit() else 0
