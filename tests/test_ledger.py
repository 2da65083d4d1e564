"""The ledger's verdict: what is lost, doubled, overlapping, early, and which repeats a kill explains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.ledger import Ledger, append


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def write(ledger: Ledger, *lines: tuple) -> None:
    """(kind, id, pid, time, facts) each."""
    with ledger.path.open("a") as file:
        for kind, name, pid, at, *facts in lines:
            line = {"kind": kind, "id": name, "pid": pid, "at": at, **(facts[0] if facts else {})}
            file.write(json.dumps(line) + "\n")


def test_all_once_is_clean(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1), ("end", "a", 2, 2))
    verdict = ledger.verdict()
    assert verdict.clean
    assert (verdict.published, verdict.ended, verdict.doubled) == (1, 1, [])


def test_published_and_not_ended_is_lost(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1))
    assert ledger.verdict().lost == ["a"]
    assert not ledger.verdict().clean


def test_a_repeat_after_a_kill_is_doubled_and_explained(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1), ("killed", "", 1, 2, {"target": 2}),
          ("start", "a", 3, 4), ("end", "a", 3, 5))
    verdict = ledger.verdict()
    assert verdict.doubled == ["a"]
    assert verdict.clean


def test_a_task_that_kills_itself_explains_its_repeat(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1), ("dying", "a", 2, 2),
          ("start", "a", 3, 4), ("end", "a", 3, 5))
    assert ledger.verdict().clean
    assert ledger.verdict().doubled == ["a"]


@pytest.mark.parametrize("killed", [[], [("killed", "", 1, 9, {"target": 2})]])
def test_a_second_start_during_the_first_run_overlaps(ledger, killed):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1), ("start", "a", 3, 4), ("end", "a", 3, 5),
          ("end", "a", 2, 6), *killed)
    assert ledger.verdict().overlap == ["a"]
    assert not ledger.verdict().clean


def test_a_second_start_in_the_same_process_after_the_end_is_unexplained(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1), ("end", "a", 2, 2), ("start", "a", 2, 3),
          ("end", "a", 2, 4))
    verdict = ledger.verdict()
    assert (verdict.unexplained, verdict.overlap) == (["a"], [])


def test_retries_of_the_framework_are_not_repeats(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 0}), ("start", "a", 2, 1, {"retries": 0}),
          ("start", "a", 2, 2, {"retries": 1}), ("end", "a", 2, 3, {"retries": 1}))
    assert ledger.verdict().clean
    assert ledger.verdict().doubled == []


def test_early_and_foreign(ledger):
    write(ledger, ("published", "a", 1, 0, {"due": 10}), ("start", "a", 2, 9), ("end", "a", 2, 11),
          ("start", "b", 2, 9), ("end", "b", 2, 9))
    verdict = ledger.verdict()
    assert (verdict.early, verdict.foreign) == (["a"], ["b"])


def test_lines_are_read_while_they_are_written(ledger):
    append(ledger.path, "start", "a", retries=0)
    with ledger.path.open("a") as file:
        file.write('{"kind": "sta')
    assert [line.id for line in ledger.wait("start", 1, timeout=1)] == ["a"]
    with pytest.raises(AssertionError, match="2 jobs"):
        ledger.wait("start", 2, timeout=0.1)
