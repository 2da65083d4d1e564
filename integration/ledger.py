"""What really ran, kept outside of the broker: an append-only file that tasks, tests and killers write to.

Every line is one `write` to an O_APPEND file, so lines of any number of processes never mix, and those of a process
that is killed right after are there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from streambroker.testing.servers import wait_until


@dataclass(frozen=True)
class Line:
    """`kind`: published, start, end, dying (a task that is about to kill its process), killed (from outside; no `id`).
    `id` names the job; `facts["retries"]` tells the framework's own repeats apart."""

    kind: str
    id: str
    pid: int
    at: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worker(self) -> str:
        """The worker's name, without its host."""
        return str(self.facts["host"]).partition("@")[0]

    @property
    def run(self) -> tuple[str, int]:
        return self.id, self.facts.get("retries", 0)


@dataclass(frozen=True)
class Verdict:
    """`lost`: published, never ended, not given up. `doubled`: started twice; `overlap`: the second time while the
    first run was alive; `unexplained`: the second time though nothing had killed the first. `early`: started before its
    due time. `foreign`: ran, never published."""

    published: int
    ended: int
    lost: list[str]
    doubled: list[str]
    unexplained: list[str]
    overlap: list[str]
    early: list[str]
    foreign: list[str]

    @property
    def clean(self) -> bool:
        """Nothing lost, and nothing ran twice without a kill."""
        return not (self.lost or self.unexplained or self.overlap or self.early or self.foreign)


def append(path: str | Path, kind: str, id: str, **facts: Any) -> None:
    """Write one line; by any process."""
    line = json.dumps({"kind": kind, "id": str(id), "pid": os.getpid(), "at": time.time(), **facts}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


#: what was judged last, by ledger; a report counts it
judged: dict[Path, Verdict] = {}


class Ledger:
    """The file at `path`, read and judged. Reading is for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: list[Line] = []
        self._size = 0

    def published(self, id: str, due: float = 0.0) -> None:
        """To be called when a publish has returned. `due` is the POSIX time before which the job must not start."""
        append(self.path, "published", id, due=due)

    def killed(self, pids: Collection[int]) -> None:
        """To be called right before these processes are killed."""
        for pid in pids:
            append(self.path, "killed", "", target=pid)

    def given_up(self, id: str) -> None:
        """Nobody owes it: its worker had acknowledged it before it was killed, or it is a dead letter by plan."""
        append(self.path, "given up", id)

    def lines(self, *kinds: str) -> list[Line]:
        """In the order of writing; all kinds when none is named."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._size)
                new = file.read()
            complete = new[:new.rfind(b"\n") + 1]  # the rest is being written
            self._size += len(complete)
            for text in complete.splitlines():
                facts = json.loads(text)
                self._read.append(Line(facts.pop("kind"), facts.pop("id"), facts.pop("pid"), facts.pop("at"), facts))
        return [line for line in self._read if not kinds or line.kind in kinds]

    def starts(self, id: str) -> list[Line]:
        """Of one job, in order."""
        return [line for line in self.lines("start") if line.id == id]

    def ids(self, kind: str) -> set[str]:
        return {line.id for line in self.lines(kind)}

    def wait(self, kind: str, count: int, timeout: float) -> list[Line]:
        """The lines of `kind`, once `count` different jobs have one. AssertionError after `timeout` seconds."""
        wait_until(lambda: len(self.ids(kind)) >= count, timeout, f"{count} jobs with a line {kind!r} in {self.path}",
                   pause=0.05)
        return self.lines(kind)

    def wait_ids(self, kind: str, ids: Iterable[str], timeout: float) -> None:
        """Wait until each of `ids` has a line of `kind`. AssertionError naming the missing ones."""
        wanted = set(ids)
        wait_until(lambda: wanted <= self.ids(kind), timeout, f"{kind} lines of {len(wanted)} jobs in {self.path}",
                   pause=0.05)

    def verdict(self) -> Verdict:
        """Judge what is in the file now."""
        published: dict[str, float] = {}
        starts: dict[tuple[str, int], list[Line]] = {}
        over: dict[tuple[tuple[str, int], int], list[float]] = {}
        dying = set()
        killed: dict[int, float] = {}
        ended, early, given_up = set(), set(), set()
        for line in self.lines():
            if line.kind == "published":
                published[line.id] = line.facts["due"]
            elif line.kind == "start":
                starts.setdefault(line.run, []).append(line)
            elif line.kind in ("end", "dying"):
                over.setdefault((line.run, line.pid), []).append(line.at)
                if line.kind == "end":
                    ended.add(line.id)
                else:
                    dying.add((line.run, line.pid))
            elif line.kind == "given up":
                given_up.add(line.id)
            elif line.kind == "killed":
                killed.setdefault(line.facts["target"], line.at)
        doubled, unexplained, overlap = set(), set(), set()
        for run, lines in starts.items():
            if lines[0].at < published.get(run[0], 0.0):
                early.add(run[0])
            for first, second in pairwise(lines):
                doubled.add(run[0])
                finished = next((at for at in over.get((run, first.pid), ()) if at >= first.at), None)
                death = killed.get(first.pid)
                if (finished is None or finished > second.at) and (death is None or death > second.at):
                    overlap.add(run[0])
                if death is None and (run, first.pid) not in dying:
                    unexplained.add(run[0])
        judged[self.path] = verdict = Verdict(
            published=len(published), ended=len(ended), lost=sorted(published.keys() - ended - given_up),
            doubled=sorted(doubled), unexplained=sorted(unexplained), overlap=sorted(overlap), early=sorted(early),
            foreign=sorted({run[0] for run in starts} - published.keys()))
        return verdict
