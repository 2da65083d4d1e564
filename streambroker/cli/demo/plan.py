"""The jobs of the demo, and which of them come from which: a job that runs again publishes its followers again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .frameworks import FRAMEWORKS

PLAIN, LATER, FLAKY, CHAINS, GROUPS, CHORDS = 150, 60, 30, 20, 6, 4
STEPS, MEMBERS, PARTS = 3, 10, 8
LATEST = 6


@dataclass(frozen=True, slots=True)
class Story:
    """One call of the publisher: `kind` says which one, `runs` what must run for it. `countdown` in seconds."""

    kind: str
    runs: tuple[str, ...]
    countdown: float = 0.0


def stories(framework: str) -> Iterator[Story]:
    """All calls, mixed as they come in a real system."""
    each = {
        "delay": [Story("delay", (f"plain-{n}",)) for n in range(PLAIN)],
        "countdown": [Story("countdown", (f"later-{n}",), 1 + LATEST * n / LATER) for n in range(LATER)],
        "retry": [Story("retry", (f"flaky-{n}", f"flaky-{n}#1")) for n in range(FLAKY)],
        "chain": [Story("chain", tuple(f"chain-{n}/{step}" for step in range(STEPS))) for n in range(CHAINS)],
        "group": [Story("group", tuple(f"group-{n}/{m}" for m in range(MEMBERS))) for n in range(GROUPS)],
        "chord": [Story("chord", (*(f"chord-{n}/{m}" for m in range(PARTS)), f"chord-{n}/total"))
                  for n in range(CHORDS)]}
    placed = [(index / len(each[kind]), story) for kind in FRAMEWORKS[framework].kinds
              for index, story in enumerate(each[kind])]
    return (story for _, story in sorted(placed, key=lambda pair: pair[0]))


def seconds(run: str) -> float:
    """How long a run works: 0.05 to 0.4 s, always the same for the same run."""
    return 0.05 + sum(run.encode()) % 8 * 0.05


def parents(story: Story) -> dict[str, Sequence[str]]:
    """The runs that publish each run; those that the publisher starts itself are left out."""
    if story.kind in ("chain", "retry"):
        return {after: (before,) for before, after in zip(story.runs[:-1], story.runs[1:], strict=True)}
    if story.kind == "chord":
        return {story.runs[-1]: story.runs[:-1]}
    return {}
