"""The demo's judgement: it must see a loss and a double that no kill explains."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from streambroker.cli.demo import ledger, plan
from streambroker.cli.demo.ledger import Event, Ledger
from streambroker.cli.demo.processes import environment
from streambroker.cli.demo.screen import Now, Screen
from streambroker.cli.demo.verdict import FOLLOWER, RUNNING, UNACKED, Kill, judge

KILL = Kill("alpha", 100.0)


def events(*told: tuple[str, str, str, float]) -> list[Event]:
    return [Event(kind, run, worker, 1 if worker == "alpha" else 2, time) for kind, run, worker, time in told]


def ran(run: str, worker: str, start: float, end: float | None) -> list[tuple[str, str, str, float]]:
    return [("start", run, worker, start), *([("end", run, worker, end)] if end else [])]


def test_all_is_well() -> None:
    verdict = judge(events(("published", "a", "", 1), *ran("a", "beta", 2, 3)), {}, KILL)
    assert (verdict.published, verdict.done, verdict.lost, verdict.doubled) == (1, 1, [], {})
    assert verdict.good


def test_a_loss_is_seen() -> None:
    verdict = judge(events(("published", "a", "", 1), ("published", "b", "", 1), *ran("a", "beta", 2, 3),
                           *ran("b", "alpha", 99, None)), {}, KILL)
    assert verdict.lost == ["b"]
    assert not verdict.good


def test_nothing_published_is_no_success() -> None:
    assert not judge([], {}, KILL).good


def test_doubles_have_reasons() -> None:
    runs = ["running", "unacked", "chain/1", "chain/2"]
    verdict = judge(events(
        *(("published", run, "", 1) for run in runs),
        *ran("running", "alpha", 99, None), *ran("running", "beta", 103, 104),
        *ran("unacked", "alpha", 99, 99.99), *ran("unacked", "beta", 103, 104),
        *ran("chain/1", "beta", 100, 101), *ran("chain/1", "beta", 104, 105),
        *ran("chain/2", "beta", 101, 102), *ran("chain/2", "beta", 105, 106),
    ), {"chain/1": ("unacked",), "chain/2": ("chain/1",)}, KILL)
    assert verdict.doubled == {"running": RUNNING, "unacked": UNACKED, "chain/1": FOLLOWER, "chain/2": FOLLOWER}
    assert verdict.good


@pytest.mark.parametrize("first", [
    ran("a", "beta", 2, 3), ran("a", "alpha", 50, 51)], ids=["elsewhere", "ended long before the kill"])
def test_a_double_without_a_kill_behind_it_fails(first: list[tuple[str, str, str, float]]) -> None:
    verdict = judge(events(("published", "a", "", 1), *first, *ran("a", "beta", 103, 104)), {}, KILL)
    assert verdict.unexplained == ["a"]
    assert not verdict.good


@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_the_plan_is_some_hundreds_of_different_runs(framework: str) -> None:
    stories = list(plan.stories(framework))
    runs = [run for story in stories for run in story.runs]
    assert 300 <= len(runs) == len(set(runs))
    kinds = {story.kind for story in stories}
    assert kinds - {"chord"} == {"delay", "countdown", "retry", "chain", "group"}
    assert {story.kind for story in stories[:20]} == kinds
    assert all(0.05 <= plan.seconds(run) <= 0.4 for run in runs)
    for chord in [story for story in stories if story.kind == "chord"]:
        assert plan.parents(chord) == {chord.runs[-1]: chord.runs[:-1]}


def test_the_ledger_reads_on_and_leaves_half_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger"
    book = Ledger(path)
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    monkeypatch.setenv(ledger.WORKER_VARIABLE, "alpha")
    ledger.write("published", "a", "b")
    ledger.write("start", "a")
    with path.open("a") as file:
        file.write(json.dumps(["start", "b", "alpha", 1, 1.0])[:9])
    book.refresh()
    told = [(event.kind, event.run) for event in book.events]
    assert told == [("published", "a"), ("published", "b"), ("start", "a")]
    with path.open("a") as file:
        file.write(json.dumps(["start", "b", "alpha", 1, 1.0])[9:] + "\n")
    ledger.write("end", "a")
    book.refresh()
    assert [event.run for event in book.running("alpha")] == ["b"]
    assert book.runs("end") == {"a"}


def test_no_setting_of_the_users_celery_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://production")
    monkeypatch.setenv("BROKER_URL", "redis://production")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    env = environment("redis-streams://demo", "redis://demo", Path("folder"))
    assert env["CELERY_BROKER_URL"] == env["BROKER_URL"] == env["DJANGO_SETTINGS_MODULE"] == ""
    assert not any("production" in value for value in env.values())


def test_the_screen_keeps_one_line_on_a_terminal_and_few_lines_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True
    now = Now(published=9, done=1, queued=2, running=3, delayed=4, held=5, recovered=1)
    for stream, breaks in ((Terminal(), 1), (io.StringIO(), 2)):
        screen = Screen(stream)
        screen.show(now)
        screen.show(now)
        screen.say("alpha is killed")
        screen.close()
        assert stream.getvalue().count("\n") == breaks
        assert "recovered 1/5  done 1" in stream.getvalue()
