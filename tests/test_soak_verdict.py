"""The soak's verdict: each kind of fault shows in it, each cause of a second start is named, a clean run is clean."""

from __future__ import annotations

from typing import Any

import pytest

from integration.ledger import Line
from integration.soak.report import as_json, as_text
from integration.soak.verdict import RECOVERY, SETTLING, Verdict, judge

MB = 1 << 20


def line(kind: str, id: str, at: float, pid: int = 10, /, **facts: Any) -> Line:
    return Line(kind, id, pid, at, facts)


def published(job: str, at: float = 0.0, *, kind: str = "plain", due: float = 0.0,
              outcome: str = "published") -> list[Line]:
    return [line("publishing", job, at, due=due, job=kind), line(outcome, job, at + 0.1, due=due)]


def run(job: str, at: float, until: float | None, *, pid: int = 20, worker: str = "w0", attempt: int = 0,
        over: str = "end", **facts: Any) -> list[Line]:
    """`until` None: it does not come to its end."""
    about = {"worker": worker, "retries": attempt}
    ends = [] if until is None else [line(over, job, until, pid, **about, **facts)]
    return [line("start", job, at, pid, **about), *ends]


def disturbed(what: str, worker: str, began: float, until: float) -> Line:
    return line("disturbed", "", until, what=what, worker=worker, began=began, until=until)


def killed(pid: int, at: float) -> Line:
    return line("killed", "", at, target=pid)


def faults(lines: list[Line], **more: Any) -> list[str]:
    verdict = judge(lines, **more)
    assert as_json(verdict)["ok"] is (not verdict.faults)
    assert as_text(verdict).splitlines()[-1] == (f"FAILED: {', '.join(verdict.faults)}" if verdict.faults else "ok")
    return verdict.faults


def causes(lines: list[Line]) -> list[str]:
    return [double.cause for double in judge(lines).doubled]


def test_all_once_is_clean():
    lines = [*published("a"), *run("a", 1, 2), *published("b", due=5), *run("b", 5, 6),
             *published("c", kind="oversized", outcome="refused"), *published("d", kind="poison"),
             *run("d", 1, 2, over="dying"), line("dead", "d", 3, reason="killed its workers")]
    verdict = judge(lines)
    assert faults(lines) == []
    assert (verdict.published, verdict.refused, verdict.done, verdict.dead) == (3, 1, 2, 1)


@pytest.mark.parametrize("lines", [[], run("a", 1, None), run("a", 1, 2, over="again", due=3)],
                         ids=["never started", "never ended", "never again"])
def test_confirmed_and_not_ended_is_lost(lines):
    assert faults([*published("a"), *lines]) == ["lost"]
    assert judge([*published("a"), *lines]).lost == ["a"]


def test_a_poison_that_vanishes_is_lost():
    assert faults([*published("a", kind="poison"), *run("a", 1, 2, over="dying")]) == ["lost"]


def test_an_unknown_publish_may_run_once_or_not_at_all():
    lines = [*published("a", outcome="raised"), *published("b", outcome="raised"), *run("b", 1, 2)]
    verdict = judge(lines)
    assert faults(lines) == []
    assert (verdict.published, verdict.unknown, verdict.unknown_ran) == (0, 2, 1)


def test_a_producer_that_died_leaves_an_unknown_publish():
    verdict = judge([line("publishing", "a", 0, due=0.0, job="plain")])
    assert (verdict.unknown, verdict.lost) == (1, [])


def test_an_unknown_publish_that_runs_twice_is_unexplained():
    assert faults([*published("a", outcome="raised"), *run("a", 1, 2), *run("a", 30, 31)]) == ["unexplained doubles"]


def test_early():
    lines = [*published("a", due=10), *run("a", 9.5, 11)]
    assert faults(lines) == ["early"]
    assert judge(lines).early == [("a", 0.5)]


def test_an_early_retry():
    lines = [*published("a"), *run("a", 1, 2, over="again", due=5), *run("a", 4, 5, attempt=1)]
    assert faults(lines) == ["early"]


def test_late_is_told_and_no_fault():
    lines = [*published("a"), *run("a", 50, 51), *published("b", due=20), *run("b", 20.2, 21)]
    verdict = judge(lines, bound=15)
    assert faults(lines, bound=15) == []
    assert verdict.late == [("a", pytest.approx(49.9))]
    assert verdict.lateness == [pytest.approx(0.2)]


def test_a_second_start_without_a_cause_is_unexplained():
    assert faults([*published("a"), *run("a", 1, 2), *run("a", 9, 10, worker="w1")]) == ["unexplained doubles"]


@pytest.mark.parametrize(("what", "cause"), [
    ("cut", "cut"), ("crash", "restart"), ("restart", "restart"), ("freeze", "lost lease"), ("hang", "lost lease")])
def test_what_hit_the_first_worker_is_the_cause(what, cause):
    def lines(worker: str, began: float, until: float) -> list[Line]:
        return [*published("a"), *run("a", 10, 20), *run("a", 19, 30, worker="w1", pid=30),
                disturbed(what, worker, began, until)]

    assert causes(lines("w0", 12, 14)) == [cause]
    assert causes(lines("", 12, 14)) == [cause]
    assert causes(lines("w0", 5, 10.5 - RECOVERY)) == [cause]
    assert causes(lines("w1", 12, 14)) == ["unexplained"]
    assert causes(lines("w0", 5, 9.5 - RECOVERY)) == ["unexplained"]
    assert causes(lines("w0", 19.5, 21)) == ["unexplained"]


def test_what_hit_the_worker_alone_is_named_before_what_hit_all():
    lines = [*run("a", 10, None), *run("a", 25, 30, worker="w1", pid=30), disturbed("crash", "", 11, 12),
             disturbed("freeze", "w0", 13, 27), disturbed("cut", "w0", 20, 21)]
    assert causes(lines) == ["lost lease"]
    assert causes([each for each in lines if each.kind != "disturbed" or not each.facts["worker"]]) == ["restart"]


@pytest.mark.parametrize(("what", "cause"), [("freeze", "lost lease"), ("hang", "lost lease"), ("cut", "cut")])
def test_a_worker_that_was_away_goes_on_with_what_it_had(what, cause):
    lines = [*run("a", 20, 21), *run("a", 30, 31, pid=30, worker="w1")]
    assert causes([*lines, disturbed(what, "w1", 10, 29)]) == [cause]
    assert causes([*lines, disturbed(what, "w2", 10, 29)]) == ["unexplained"]
    assert causes([*lines, disturbed(what, "w1", 22, 29)]) == ["unexplained"]
    assert causes([*lines, disturbed(what, "w1", 10, 29.5 - RECOVERY)]) == ["unexplained"]


def test_a_deploy_is_no_cause():
    assert causes([*run("a", 10, 20), *run("a", 19, 30, worker="w1"), disturbed("deploy", "w0", 12, 18)]) == [
        "unexplained"]


def test_what_happens_well_after_the_end_is_no_cause():
    for what in (disturbed("cut", "w0", 12 + SETTLING, 14), killed(20, 12 + SETTLING)):
        assert causes([*run("a", 10, 11.5), *run("a", 19, 30, worker="w1"), what]) == ["unexplained"]


def test_a_kill_is_the_cause_for_its_own_process_alone():
    lines = [*run("a", 10, None), *run("a", 14, 15, worker="w1", pid=30)]
    assert causes([*lines, killed(20, 12)]) == ["kill"]
    assert causes([*lines, killed(30, 12)]) == ["unexplained"]
    assert causes([*lines, killed(20, 9)]) == ["unexplained"]
    assert causes([*lines, killed(20, 14.5)]) == ["unexplained"]


def test_poison_explains_itself_and_what_ran_beside_it():
    lines = [*run("a", 10, 11, over="dying"), *run("a", 14, 15, pid=30, over="dying"), *run("b", 10, None),
             *run("b", 14, 14.5, pid=31)]
    assert sorted(causes(lines)) == ["kill", "poison"]


def test_an_attempt_inherits_the_cause_of_the_one_before():
    first = run("a", 1, 2, over="again", due=3)
    second = [*run("a", 4, 5, worker="w1", pid=30, attempt=1), *run("a", 8, 9, worker="w1", pid=30, attempt=1)]
    assert causes([*first, *second]) == ["unexplained"]
    assert causes([*first, *second, killed(20, 2.5)]) == ["kill"]
    twice = [*first, *run("a", 5, 6, pid=31, over="again", due=7), killed(20, 2.5)]
    assert causes([*twice, *second]) == ["kill", "kill"]


def test_attempts_are_no_doubles():
    lines = [*published("a"), *run("a", 1, 2, over="again", due=3), *run("a", 3, 4, attempt=1)]
    assert faults(lines) == []
    assert causes(lines) == []


def test_every_start_after_the_first_is_judged():
    lines = [*run("a", 10, None), *run("a", 14, 15, pid=30, worker="w1"), *run("a", 20, 21, pid=40, worker="w2"),
             killed(20, 12)]
    assert causes(lines) == ["kill", "unexplained"]


def test_what_nobody_published_is_foreign():
    assert faults(run("a", 1, 2)) == ["foreign"]


@pytest.mark.parametrize("lines", [
    published("a", kind="oversized"), [*published("a", kind="oversized", outcome="raised"), *run("a", 1, 2)]])
def test_an_oversized_job_must_be_refused(lines):
    assert "accepted over the limit" in faults(lines)


def test_a_dead_letter_that_killed_nobody_is_condemned():
    lines = [*published("a"), line("dead", "a", 3, reason="why")]
    assert faults(lines) == ["condemned"]
    assert judge(lines).condemned == [("a", "why")]


def test_what_is_left_and_troubles_are_faults():
    assert faults([], left=["db 0 soak:x: stream of 1"]) == ["left in the store"]
    assert faults([], troubles=["w1: did not stop"]) == ["troubles"]


def memory(worker: str, sizes: list[float]) -> list[Line]:
    return [line("memory", "", 10.0 * number, worker=worker, process=5, bytes=size * MB)
            for number, size in enumerate(sizes)]


def test_a_worker_that_grows():
    growing = [40, *(60 + number * 3 for number in range(20))]
    assert faults(memory("w0", growing)) == ["memory"]
    assert faults(memory("w0", [40, *[60] * 20])) == []
    assert faults(memory("w0", growing[:5])) == []  # it has not lived for long


def test_each_fault_is_in_the_text():
    verdict = Verdict(lost=["lost-1"], foreign=["foreign-1"], accepted=["large-1"], early=[("early-1", 0.5)],
                      condemned=[("dead-1", "why")], left=["left-1"], troubles=["trouble-1"], late=[("late-1", 20.0)])
    text = as_text(verdict)
    for word in ("lost-1", "foreign-1", "large-1", "early-1", "dead-1", "left-1", "trouble-1", "late-1"):
        assert word in text
