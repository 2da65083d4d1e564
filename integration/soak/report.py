"""A verdict as people and programs read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from integration.soak.verdict import Verdict

#: rows of one kind that are shown to people
_SHOWN = 20


def as_json(verdict: Verdict) -> dict[str, Any]:
    """All of it; `ok` is what the exit code says."""
    return {**dataclasses.asdict(verdict), "lateness": lateness(verdict), "causes": verdict.causes,
            "faults": verdict.faults, "ok": not verdict.faults}


def lateness(verdict: Verdict) -> dict[str, float]:
    """Seconds after its time at which half of the delayed jobs, 99 of 100 and the last had started."""
    rows = verdict.lateness
    if not rows:
        return {}
    return {"half": rows[len(rows) // 2], "p99": rows[min(len(rows) - 1, len(rows) * 99 // 100)], "most": rows[-1]}


def as_text(verdict: Verdict) -> str:
    """Many lines; the last one is the result."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    yield (f"published and confirmed {verdict.published}, refused as too large {verdict.refused}, unknown (publishing "
           f"raised) {verdict.unknown}, {verdict.unknown_ran} of them ran")
    yield f"done {verdict.done}, dead letters {verdict.dead}"
    yield f"disturbances: {_counts(verdict.disturbances)}"
    yield f"doubled {len(verdict.doubled)}: {_counts(verdict.causes)}"
    yield from _rows(f"{each.job} attempt {each.attempt} on {each.worker}, again after "
                     f"{each.second - each.first:.1f} s: {each.cause} (first start {each.first:.3f})"
                     for each in sorted(verdict.doubled, key=lambda each: each not in verdict.unexplained))
    told = lateness(verdict)
    if told:
        yield (f"delayed jobs started after their time: half within {told['half']:.3f} s, 99 of 100 within "
               f"{told['p99']:.3f} s, all within {told['most']:.3f} s")
    yield f"late {len(verdict.late)}"
    yield from _rows(f"{job}: {seconds:.1f} s" for job, seconds in verdict.late)
    for each in verdict.memory:
        if each.seconds >= 60:
            yield (f"memory of {each.worker} (process {each.process}, {each.seconds:.0f} s): {each.start / 1e6:.1f} MB "
                   f"at first, {each.end / 1e6:.1f} MB in the end{', GREW' if each.grew else ''}")
    yield f"lost {len(verdict.lost)}"
    yield from _rows(verdict.lost)
    yield f"early {len(verdict.early)}"
    yield from _rows(f"{job}: {seconds:.3f} s" for job, seconds in verdict.early)
    for name, rows in (("published by nobody", verdict.foreign), ("accepted over the limit", verdict.accepted),
                       ("dead without killing", [f"{job}: {reason}" for job, reason in verdict.condemned]),
                       ("left in the store", verdict.left), ("troubles", verdict.troubles)):
        if rows:
            yield f"{name} {len(rows)}"
            yield from _rows(rows)
    yield f"FAILED: {', '.join(verdict.faults)}" if verdict.faults else "ok"


def _rows(rows: Iterator[str] | Sequence[str]) -> Iterator[str]:
    for number, row in enumerate(rows):
        if number == _SHOWN:
            yield "  and more"
            return
        yield f"  {row}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
