"""What the ledger says in the end: what was lost, what ran twice, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .ledger import Event

#: an acknowledgement is on its way for some 10 ms; what ended longer before the kill must not run again
ACK_WINDOW = 1.0

RUNNING = "was running in the killed worker"
UNACKED = "had just ended in the killed worker, before its acknowledgement was sent"
FOLLOWER = "follows a job that started twice for another reason"


@dataclass(frozen=True, slots=True)
class Kill:
    worker: str
    time: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Runs by name. `doubled` has a reason for each; an empty one is a double that no kill explains."""

    published: int
    done: int
    lost: Sequence[str]
    doubled: Mapping[str, str] = field(default_factory=dict)

    @property
    def unexplained(self) -> list[str]:
        return [run for run, reason in self.doubled.items() if not reason]

    @property
    def good(self) -> bool:
        return self.published > 0 and not self.lost and not self.unexplained


def judge(events: Sequence[Event], parents: Mapping[str, Sequence[str]], kill: Kill | None) -> Verdict:
    published = {event.run for event in events if event.kind == "published"}
    ended = {event.run for event in events if event.kind == "end"}
    starts = Counter(event.run for event in events if event.kind == "start")
    doubled = {run for run, count in starts.items() if count > 1}
    reasons: dict[str, str] = {}
    for run in doubled:
        reasons[run] = _reason(run, events, kill) if kill else ""
    grown = True
    while grown:
        followers = [run for run in doubled if not reasons[run]
                     and any(reasons.get(parent) for parent in parents.get(run, ()))]
        reasons.update(dict.fromkeys(followers, FOLLOWER))
        grown = bool(followers)
    return Verdict(len(published), len(published & ended), sorted(published - ended), dict(sorted(reasons.items())))


def _reason(run: str, events: Sequence[Event], kill: Kill) -> str:
    """Why `run` started twice, as far as the killed worker's own start of it tells."""
    here = [event for event in events if event.run == run and event.worker == kill.worker]
    if not any(event.kind == "start" for event in here):
        return ""
    ends = [event.time for event in here if event.kind == "end"]
    if not ends:
        return RUNNING
    return UNACKED if kill.time - max(ends) <= ACK_WINDOW else ""
