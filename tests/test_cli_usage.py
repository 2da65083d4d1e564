"""How the command line is used: help, errors, exit codes, secrets, formats."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streambroker.cli import main
from streambroker.cli.entry import build_parser
from streambroker.cli.failures import masked
from streambroker.cli.output import age, plain, print_table

COMMANDS = ["queues", "workers", "dead ls", "dead show", "dead replay", "dead rm", "dead purge", "delayed ls",
            "delayed rm", "purge", "serve redis", "serve jetstream", "demo"]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is bound but where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"streambroker {command}" in text[text.index("examples:"):]
    assert "--json" in text


def test_help_lists_all_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = build_parser().format_help()
    assert {command.split()[0] for command in COMMANDS} <= set(text.split())
    assert "exit codes" in text


@pytest.mark.parametrize("argv", [
    [], ["nonsense"], ["dead"], ["dead", "rm", "x"], ["purge"], ["queues", "--option", "prefix"],
    ["queues", "--option", "proof_of_death=perhaps"], ["dead", "ls", "--limit", "0"],
    ["serve", "redis", "--port", "70000"], ["serve", "redis", "--fsync", "never"], ["demo", "--engine", "paper"],
    ["queues", "--js"]], ids=" ".join)
def test_wrong_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "said"), [
    (["serve", "redis", "--port", "http"], "'http' is no port: a number from 0 to 65535"),
    (["dead", "ls", "--limit", "all"], "'all' is no number from 1 on")])
def test_values_that_cannot_be_used_are_told_in_plain_words(argv: list[str], said: str,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "said"), [
    (["queues", "--url", "memory://x", "--option", "visibility_timeot=3"], "did you mean visibility_timeout?"),
    (["queues", "--url", "memory://x", "--option", "visibility_timeout=0"], "out of bounds"),
    (["queues", "--url", "memory://x", "--option", "visibility_timeout=90000"], "here it is a lease"),
    (["queues", "--url", "amqp://u:hidden@h"], "no engine for amqp://; known: redis-streams"),
    (["queues", "--url", "redis-stream://u:hidden@h"], "did you mean redis-streams://?"),
    (["queues", "--url", "u:hidden@h:6379/0"], "the URL has no scheme"),
    (["queues", "--url", "redis-streams://one/0;redis-streams://two/0"], "one URL, please"),
    (["queues", "--url", "redis-streams://one;redis-streams://two"], "one URL, please"),
    (["queues", "--url", "redis-streams://h:port/0"], "the port in the URL must be a number"),
    (["queues", "--url", "redis-streams://:hidden/more@h:6379/0"], "/ ? # @ are written"),
    (["queues", "--url", "redis-streams://h:6379/hidden"], "must be a number: redis-streams://host:6379/0")])
def test_settings_that_cannot_be_used_are_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "hidden" not in error


def test_values_of_options_are_typed() -> None:
    args = vars(build_parser().parse_args([
        "--option", "delivery_limit=none", "queues", "--option", "proof_of_death=no", "--option", "prefix=none",
        "--option", "priority_steps=0,5", "--option", "visibility_timeout=7.5"]))
    assert args["option:delivery_limit"] is None
    assert args["option:proof_of_death"] is False
    assert args["option:prefix"] == "none"
    assert args["option:priority_steps"] == ("0", "5")
    assert args["option:visibility_timeout"] == "7.5"


def test_an_error_of_the_parser_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["queues://u:hidden@host/0"])
    assert "hidden" not in capsys.readouterr().err


@pytest.mark.parametrize(("text", "safe"), [
    ("redis-streams://user:pa@ss@host:6379/0 refuses", "redis-streams://***@host:6379/0 refuses"),
    ("rediss://:pw@h/0?ssl_password=abc&db=1", "rediss://***@h/0?ssl_password=***&db=1"),
    ("nats://TOKEN@h", "nats://***@h"),
    ("redis://host:6379/0 and mail@host", "redis://host:6379/0 and mail@host")])
def test_masked(text: str, safe: str) -> None:
    assert masked(text) == safe


def test_an_unreachable_store_is_1_and_says_so(closed_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["queues", "--url", f"redis-streams://u:hidden@127.0.0.1:{closed_port}/0"]) == 1
    error = capsys.readouterr().err
    assert "cannot be reached" in error
    assert "refused. Is the server running" in error
    assert "hidden" not in error
    assert "Traceback" not in error


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt
    monkeypatch.setattr("streambroker.cli.options.connect", interrupt)
    monkeypatch.setenv("STREAMBROKER_URL", "memory://x")
    assert main(["queues"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_python_m_is_the_same_and_a_closed_pipe_is_no_traceback() -> None:
    argv = [sys.executable, "-m", "streambroker", "queues", "--json", "--url", "memory://x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")


def test_the_command_line_needs_no_framework_and_no_client() -> None:
    code = ("import sys, streambroker.cli.entry as m; m.build_parser(); "
            "print([x for x in ('redis', 'kombu', 'celery', 'nats') if x in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"


def test_tables_align_and_escape(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("NAME", "N", "WHY"), [("a", 5, "x"), ("long", 12345, "y\n")])
    assert capsys.readouterr().out.splitlines() == ["NAME      N  WHY", "a         5  x", r"long  12345  y\n"]


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "-"), (0.04, "0.0s"), (59.94, "59.9s"), (61, "1m01s"), (3700, "1h01m"), (90000, "1d01h")])
def test_age(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


def test_plain() -> None:
    assert plain("ä b\t\x1b\udc80") == r"ä b\t\x1b\udc80"
