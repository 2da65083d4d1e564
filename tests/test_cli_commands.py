"""The commands on the memory engine: what they print, what they change, how they end."""

from __future__ import annotations

import io
import json
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streambroker.cli import main
from streambroker.connection import connect
from streambroker.engine import Consumer, Engine
from streambroker.message import Message, QueueSpec

Run = Callable[..., int]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    engine = connect(url)
    yield engine
    engine.close()


@pytest.fixture
def run(url: str) -> Run:
    def call(*argv: str) -> int:
        return main([*argv, "--url", url])
    return call


def message(n: int, task: str = "shop.charge", **kw: Any) -> Message:
    head = {"type": task, "x": n}
    return Message(f'{{"n": {n}}}'.encode(), json.dumps(head).encode(), id=f"task-{n}", **kw)


def deliveries(consumer: Consumer, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        got = consumer.receive(5, limit=count - len(found))
        assert got, f"only {len(found)} of {count} came"
        found += got
    return found


def bury(engine: Engine, *reasons: str, queue: str = "mail", task: str = "shop.charge") -> None:
    """One dead letter for each reason, task-0, task-1, ..."""
    engine.publish(queue, [message(n, task) for n in range(len(reasons))])
    consumer = engine.consume([queue])
    for delivery, reason in zip(deliveries(consumer, len(reasons)), reasons, strict=True):
        consumer.dead_letter(delivery, reason)
    consumer.close()


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_queues_tells_ready_delayed_in_flight_by_holder_and_dead(
        engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, "bad card")
    engine.publish("mail", [message(n) for n in range(5)])
    engine.publish("mail", [message(9, delay=60)])
    deliveries(engine.consume(["mail"]), 2)
    engine.declare(QueueSpec("reply", durable=False, expires=60))

    assert run("queues", "--json", "--deliveries") == 0
    [mail] = answer(capsys)
    counts = {name: mail[name] for name in ("queue", "ready", "delayed", "in_flight", "dead")}
    assert counts == {"queue": "mail", "ready": 3, "delayed": 1, "in_flight": 2, "dead": 1}
    assert mail["oldest_age"] >= 0
    [holder] = mail["holders"]
    assert holder["count"] == 2
    assert holder["oldest_age"] >= 0
    assert holder["max_delivery_count"] == 1
    assert [(d["holder"], d["delivery_count"]) for d in mail["deliveries"]] == [(holder["holder"], 1)] * 2

    assert run("queues") == 0
    text = capsys.readouterr().out
    assert "mail" in text
    assert holder["holder"] in text
    assert "1 reply and control queues not shown" in text

    assert run("queues", "--all", "--json") == 0
    assert [record["queue"] for record in answer(capsys)] == ["mail", "reply"]
    assert run("queues", "reply", "--json") == 0
    assert [record["queue"] for record in answer(capsys)] == ["reply"]


def test_an_unknown_queue_is_an_error_with_the_nearest_name(
        engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    engine.declare(QueueSpec("mail"))
    for argv in (["queues", "mial"], ["dead", "ls", "-Q", "mial"], ["purge", "-Q", "mial", "--yes"],
                 ["dead", "replay", "-Q", "mial", "--yes"], ["delayed", "rm", "-Q", "mial", "x", "--yes"]):
        assert run(*argv) == 1
        assert "did you mean 'mail'?" in capsys.readouterr().err


def test_workers(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("workers") == 0
    assert "no worker" in capsys.readouterr().out
    consumer = engine.consume(["mail"])
    consumer.receive(0)
    assert run("workers", "--json") == 0
    [worker] = answer(capsys)
    assert worker["queues"] == ["mail"]
    assert worker["lease"] == 30
    assert run("workers") == 0
    assert worker["holder"] in capsys.readouterr().out


def test_dead_ls_and_show(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, "bad card", "no network")
    bury(engine, "bad address", queue="post", task="post.send")

    assert run("dead", "ls", "--json", "--queue", "mail") == 0
    first, second = answer(capsys)
    assert [first["reason"], second["reason"]] == ["bad card", "no network"]
    assert first["delivery_count"] == 1
    assert first["message_id"] == "task-0"
    assert first["type"] == "shop.charge"
    assert first["first"] <= first["last"]

    assert run("dead", "ls") == 0
    assert "bad address" in capsys.readouterr().out
    assert run("dead", "ls", "--json", "--type", "post.send") == 0
    assert [dead["queue"] for dead in answer(capsys)] == ["post"]
    assert run("dead", "ls", "--json", "--reason", "network") == 0
    assert [dead["id"] for dead in answer(capsys)] == [second["id"]]
    assert run("dead", "ls", "--json", "-Q", "mail", "--limit", "1") == 0
    assert [dead["id"] for dead in answer(capsys)] == [first["id"]]

    for name in (second["id"], "task-1"):
        assert run("dead", "show", "--queue", "mail", name, "--json") == 0
        shown = answer(capsys)
        assert shown["reason"] == "no network"
        assert shown["body"] == '{"n": 1}'
        assert shown["headers"] == {"type": "shop.charge", "x": 1}
    assert run("dead", "show", "task-1") == 0
    assert '"n": 1' in capsys.readouterr().out
    assert run("dead", "show", "nobody") == 1
    assert "no dead letter 'nobody'" in capsys.readouterr().err


def test_undecodable_bodies_and_hostile_texts_are_shown_harmlessly(
        engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    queue = "new\nline\x1b[2J"
    engine.publish(queue, [Message(b"\xff\x00", b"\x00no json")])
    consumer = engine.consume([queue])
    [delivery] = deliveries(consumer, 1)
    consumer.dead_letter(delivery, "tells \x1b[31mlies\n")
    assert run("dead", "ls", "--json") == 0
    [dead] = answer(capsys)
    assert (dead["queue"], dead["reason"]) == (queue, "tells \x1b[31mlies\n")
    assert run("dead", "show", dead["id"], "--json") == 0
    assert answer(capsys)["body_base64"] == "/wA="
    for argv in (["dead", "ls"], ["queues"], ["dead", "show", dead["id"]]):
        assert run(*argv) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text
        assert r"\x1b[" in text


def test_replay_puts_back_as_new_deliveries(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, "bad card", "no network", "no network", "no network")
    assert run("dead", "replay", "--queue", "mail", "--limit", "2", "--reason", "network", "--yes", "--json") == 0
    assert answer(capsys) == {"queue": "mail", "replayed": 2}
    assert run("dead", "replay", "--queue", "mail", "task-3", "--yes") == 0
    assert "replayed 1 " in capsys.readouterr().out
    back = deliveries(engine.consume(["mail"]), 3)
    assert [(d.message.id, d.count) for d in back] == [("task-1", 1), ("task-2", 1), ("task-3", 1)]
    assert [dead.message.id for dead in engine.inspector().dead("mail")] == ["task-0"]


def test_a_missing_id_changes_nothing(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, "bad card")
    for command in ("replay", "rm"):
        assert run("dead", command, "-Q", "mail", "task-0", "task-7", "--yes") == 1
        assert "task-7" in capsys.readouterr().err
    assert engine.inspector().stats("mail").dead == 1
    assert engine.inspector().stats("mail").ready == 0


def test_dead_rm_and_purge(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, "a", "b", "c", "b")
    assert run("dead", "rm", "-Q", "mail", "task-0", "--yes", "--json") == 0
    assert answer(capsys) == {"queue": "mail", "removed": 1}
    assert run("dead", "purge", "-Q", "mail", "--reason", "b", "--yes", "--json") == 0
    assert answer(capsys) == {"queue": "mail", "removed": 2}
    assert run("dead", "purge", "--yes", "--queue", "mail") == 0
    assert engine.inspector().stats("mail").dead == 0
    capsys.readouterr()
    assert run("dead", "purge", "--yes", "--queue", "mail", "--json") == 0
    assert answer(capsys) == {"queue": "mail", "removed": 0}


def test_delayed_ls_and_rm(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    engine.publish("mail", [message(1, delay=50), message(2, delay=40)])
    engine.publish("post", [message(3, delay=30), message(4)])
    assert run("delayed", "ls", "--json") == 0
    waiting = answer(capsys)
    assert [each["message_id"] for each in waiting] == ["task-3", "task-2", "task-1"]
    assert run("delayed", "ls", "-Q", "mail", "--limit", "1") == 0
    assert "task-2" in (text := capsys.readouterr().out)
    assert "task-1" not in text
    assert run("delayed", "rm", "task-1", waiting[0]["id"], "--yes", "--json") == 0
    assert answer(capsys) == {"removed": 2}
    assert [each.message.id for each in engine.inspector().delayed("mail")] == ["task-2"]
    assert run("delayed", "rm", "task-4", "--yes") == 1
    assert "task-4" in capsys.readouterr().err


def test_purge_leaves_what_runs(engine: Engine, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    engine.publish("mail", [message(n) for n in range(4)])
    engine.publish("mail", [message(9, delay=60)])
    consumer = engine.consume(["mail"])
    [held] = deliveries(consumer, 1)
    assert run("purge", "--yes", "--queue", "mail", "--json") == 0
    assert answer(capsys) == [{"queue": "mail", "removed": 4}]
    stats = engine.inspector().stats("mail")
    assert (stats.ready, stats.delayed, stats.in_flight) == (0, 0, 1)
    assert not held.lost


DESTRUCTIVE = [["purge", "-Q", "mail"], ["dead", "purge", "-Q", "mail"], ["dead", "rm", "-Q", "mail", "task-0"],
               ["dead", "replay", "-Q", "mail"], ["delayed", "rm", "task-8"]]


@pytest.mark.parametrize("argv", DESTRUCTIVE, ids=" ".join)
def test_nothing_is_changed_without_consent(
        argv: list[str], engine: Engine, run: Run, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    bury(engine, "bad card")
    engine.publish("mail", [message(5), message(8, delay=60)])
    before = engine.inspector().stats("mail")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert run(*argv) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert run(*argv) == 1
    after = engine.inspector().stats("mail")
    assert (after.ready, after.delayed, after.dead) == (before.ready, before.delayed, before.dead)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run(*argv) == 0
    after = engine.inspector().stats("mail")
    assert (after.ready, after.delayed, after.dead) != (before.ready, before.delayed, before.dead)


def test_prefix_and_options_reach_the_engine(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = connect(url, prefix="other")
    engine.declare(QueueSpec("mail"))
    assert main(["queues", "--json", "--url", url]) == 0
    assert answer(capsys) == []
    assert main(["--prefix", "other", "queues", "--json", "--url", url, "--option", "priority_steps=0,5"]) == 0
    assert [record["queue"] for record in answer(capsys)] == ["mail"]
    assert main(["--url", url, "--json", "--option", "global_keyprefix=other", "queues"]) == 0
    assert [record["queue"] for record in answer(capsys)] == ["mail"]
    engine.close()


def test_the_url_may_come_from_the_environment(
        url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMBROKER_URL", raising=False)
    assert main(["queues"]) == 2
    assert "STREAMBROKER_URL" in capsys.readouterr().err
    monkeypatch.setenv("STREAMBROKER_URL", url)
    assert main(["queues", "--json"]) == 0
    assert answer(capsys) == []


def test_a_long_command_shows_a_bar_on_a_terminal(
        engine: Engine, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bury(engine, *["x"] * 450)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert run("dead", "purge", "-Q", "mail", "--yes") == 0
    assert "removed [" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[K")
    assert "removed 450 dead letters of mail" in capsys.readouterr().out
