"""The judgement: a pure function over the lines of a ledger and what was left in the store.

Kinds of lines beside `publishing`, `published`, `refused`, `raised` (see producer), `start`, `again`, `end`, `dying`
(see jobs) and `killed` (see Ledger): `dead` (a dead letter, with its reason), `disturbed` (what happened to which
worker, or to the store, when it began and until when) and `memory` (bytes of a worker's process, whose id is
`process`).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from integration.ledger import Line

#: disturbance -> what it is called as the cause of a second start
CAUSES = {"cut": "cut", "crash": "restart", "restart": "restart", "freeze": "lost lease", "hang": "lost lease"}
KILL, POISON, UNEXPLAINED = "kill", "poison", "unexplained"
#: seconds that an acknowledgement may take after a job's end
SETTLING = 1.0
#: seconds that links may take to be back after the end of a disturbance
RECOVERY = 3.0
#: seconds: the unit of due times in the frameworks and stores
_TICK = 0.001
#: a worker's process that lived for so many seconds is asked whether it has grown, by this much and so many bytes
_LIFE, _GROWTH, _SLACK = 90.0, 1.2, 8 << 20


@dataclass(frozen=True)
class Double:
    """`first` and `second` are POSIX times of two starts of the same attempt."""

    job: str
    attempt: int
    cause: str
    worker: str
    first: float
    second: float


@dataclass(frozen=True)
class Memory:
    """Bytes of one life of a worker's process; medians of its first and of its last samples."""

    worker: str
    process: int
    seconds: float
    start: float
    end: float

    @property
    def grew(self) -> bool:
        return self.seconds >= _LIFE and self.end > self.start * _GROWTH + _SLACK


@dataclass
class Verdict:
    """`lost`: confirmed to its publisher, neither ended nor dead. `early`, `late`: job and seconds. `unknown`: their
    publishing raised; `unknown_ran` of these did run. `foreign`: ran, and nobody has published it. `accepted`: over the
    limit, and not refused. `condemned`: dead letters of jobs that kill nobody, with the reason. `lateness`: seconds
    after its time of each delayed job. `left`: lines of what is in the store over its base. `troubles`: what went wrong
    with the processes, say a clean stop that took too long."""

    published: int = 0
    refused: int = 0
    unknown: int = 0
    unknown_ran: int = 0
    done: int = 0
    dead: int = 0
    lost: list[str] = field(default_factory=list)
    early: list[tuple[str, float]] = field(default_factory=list)
    doubled: list[Double] = field(default_factory=list)
    late: list[tuple[str, float]] = field(default_factory=list)
    lateness: list[float] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    condemned: list[tuple[str, str]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    disturbances: dict[str, int] = field(default_factory=dict)

    @property
    def unexplained(self) -> list[Double]:
        return [double for double in self.doubled if double.cause == UNEXPLAINED]

    @property
    def causes(self) -> dict[str, int]:
        return dict(Counter(double.cause for double in self.doubled))

    @property
    def faults(self) -> list[str]:
        """Names of what must be empty and is not; `late` and explained doubles are no faults."""
        found = {"lost": self.lost, "early": self.early, "unexplained doubles": self.unexplained,
                 "foreign": self.foreign, "accepted over the limit": self.accepted, "condemned": self.condemned,
                 "left in the store": self.left, "troubles": self.troubles,
                 "memory": [each for each in self.memory if each.grew]}
        return [name for name, rows in found.items() if rows]


class _Story:
    """The lines, sorted by what they are about."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.publishing: dict[str, Line] = {}
        self.outcome: dict[str, Line] = {}
        self.starts: dict[tuple[str, int], list[Line]] = defaultdict(list)
        self.again: dict[tuple[str, int], list[Line]] = defaultdict(list)
        self.over: dict[tuple[tuple[str, int], int], list[Line]] = defaultdict(list)
        self.ended: set[str] = set()
        self.dead: dict[str, str] = {}
        self.killed: dict[int, list[float]] = defaultdict(list)
        self.disturbed: list[Line] = []
        self.memory: dict[tuple[str, int], list[Line]] = defaultdict(list)
        for line in lines:
            self._sort(line)

    def _sort(self, line: Line) -> None:
        if line.kind == "publishing":
            self.publishing[line.id] = line
        elif line.kind in ("published", "refused", "raised"):
            self.outcome[line.id] = line
        elif line.kind == "start":
            self.starts[line.run].append(line)
        elif line.kind in ("again", "end", "dying"):
            self.over[line.run, line.pid].append(line)
            if line.kind == "again":
                self.again[line.run].append(line)
            elif line.kind == "end":
                self.ended.add(line.id)
            else:  # with everything else that ran in its process
                self.killed[line.pid].append(line.at)
        elif line.kind == "dead":
            self.dead[line.id] = line.facts["reason"]
        elif line.kind == "killed":
            self.killed[line.facts["target"]].append(line.at)
        elif line.kind == "disturbed":
            self.disturbed.append(line)
        elif line.kind == "memory":
            self.memory[line.facts["worker"], line.facts["process"]].append(line)

    def of_outcome(self, kind: str) -> set[str]:
        """A producer that was killed has written none: nobody knows, as when it raised."""
        return {job for job in self.publishing
                if (self.outcome[job].kind if job in self.outcome else "raised") == kind}

    def kind(self, job: str) -> str:
        return str(self.publishing[job].facts["job"])

    def finish(self, start: Line) -> Line | None:
        return next((line for line in self.over.get((start.run, start.pid), ()) if line.at >= start.at), None)

    def due(self, run: tuple[str, int]) -> float:
        job, attempt = run
        if not attempt:
            return float(self.publishing[job].facts["due"]) if job in self.publishing else 0.0
        return min((line.facts["due"] for line in self.again.get((job, attempt - 1), ())), default=0.0)

    def hit(self, start: Line, until: float) -> str:
        """What may have made somebody else start the same before `until`, though this start was there; or nothing."""
        finish = self.finish(start)
        if finish is not None and finish.kind == "dying":
            return POISON
        end = min(until, finish.at + SETTLING if finish else until)
        if any(start.at <= at <= end for at in self.killed.get(start.pid, ())):
            return KILL
        hits = [facts for line in self.disturbed if (facts := line.facts)["worker"] in ("", start.facts["worker"])
                and facts["what"] in CAUSES and facts["began"] <= end and facts["until"] + RECOVERY >= start.at]
        if not hits:
            return ""
        # what happened to this worker alone rather than to all, and first
        return CAUSES[min(hits, key=lambda facts: (not facts["worker"], facts["began"]))["what"]]

    def silence(self, first: Line, second: Line) -> str:
        """Why the second worker may have had the job before the first one: it was out of reach when that started it,
        and went on with what it had when that was over; or nothing."""
        for line in self.disturbed:
            began, until = line.facts["began"], line.facts["until"] + RECOVERY
            if (line.facts["worker"] == second.facts["worker"] and line.facts["what"] in CAUSES
                    and began <= first.at <= second.at <= until):
                return CAUSES[line.facts["what"]]
        return ""


def judge(lines: Sequence[Line], *, left: Sequence[str] = (), troubles: Sequence[str] = (),
          bound: float = 35.0) -> Verdict:
    """`left` and `troubles` are those of the verdict, `bound` the seconds after its time from which a job is late."""
    story = _Story(lines)
    published = story.of_outcome("published")
    unknown = story.of_outcome("raised")
    verdict = Verdict(
        published=len(published), refused=len(story.of_outcome("refused")), unknown=len(unknown),
        unknown_ran=len(unknown & {job for job, _ in story.starts}), done=len(story.ended), dead=len(story.dead),
        lost=sorted(published - story.ended - story.dead.keys()),
        foreign=sorted({job for job, _ in story.starts} - story.publishing.keys()),
        accepted=sorted(job for job in story.publishing
                        if story.kind(job) == "oversized" and (job in published or (job, 0) in story.starts)),
        condemned=sorted((job, reason) for job, reason in story.dead.items()
                         if job not in story.publishing or story.kind(job) != "poison"),
        left=list(left), troubles=list(troubles),
        doubled=sorted(_doubles(story), key=lambda double: double.second),
        memory=[_memory(worker, process, samples) for (worker, process), samples in story.memory.items()],
        disturbances=dict(Counter(line.facts["what"] for line in story.disturbed)))
    for run, starts in story.starts.items():
        due, first = story.due(run), min(line.at for line in starts)
        if first < due - _TICK:
            verdict.early.append((run[0], due - first))
        if run[1] == 0 and run[0] not in published:
            continue
        since = max(due, story.outcome[run[0]].at) if run[1] == 0 else due
        if due:
            verdict.lateness.append(max(0.0, first - since))
        if first - since > bound:
            verdict.late.append((run[0], first - since))
    verdict.lateness.sort()
    verdict.late.sort(key=lambda row: -row[1])
    return verdict


def _doubles(story: _Story) -> Iterator[Double]:
    for run, starts in story.starts.items():
        for first, second in pairwise(sorted(starts, key=lambda line: line.at)):
            cause = (story.hit(first, second.at) or story.silence(first, second) or _inherited(story, run, second.at)
                     or UNEXPLAINED)
            yield Double(run[0], run[1], cause, first.facts["worker"], first.at, second.at)


def _inherited(story: _Story, run: tuple[str, int], until: float) -> str:
    """An attempt that ran twice asks twice for the next one; one whose link broke may ask in vain, or twice."""
    job, attempt = run
    for start in story.starts.get((job, attempt - 1), ()) if attempt else ():
        cause = story.hit(start, until) or _inherited(story, (job, attempt - 1), until)
        if cause:
            return cause
    return ""


def _memory(worker: str, process: int, samples: Sequence[Line]) -> Memory:
    sizes = [line.facts["bytes"] for line in samples]
    part = max(1, len(sizes) // 5)
    # the first sample is of a process that still starts
    return Memory(worker, process, samples[-1].at - samples[0].at, statistics.median(sizes[1:part + 1] or sizes),
                  statistics.median(sizes[-part:]))
