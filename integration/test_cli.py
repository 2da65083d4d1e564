"""The command line as users and scripts call it, on real data of a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.base import leftovers
from integration.stores import Server
from streambroker.connection import connect
from streambroker.embedded import answers_ping, free_port
from streambroker.engine import Consumer, Engine
from streambroker.message import Delivery, Message, QueueSpec
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUEUES = ["mail", "a.b", "a..b", "Q", "q", "пошта", "with space", "new\nline", "{tag}", "x" * 200]


def cli(*argv: str, code: int = 0, timeout: float = 60, **env: str) -> str:
    """Runs a command; its stdout. Both outputs are one when it is well: a script may read them together."""
    done = subprocess.run([sys.executable, "-m", "streambroker", *argv], capture_output=True, text=True,
                          timeout=timeout, stdin=subprocess.DEVNULL, env={**os.environ, **env}, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    if code == 0:
        assert done.stderr == ""
        return done.stdout
    return done.stderr


@pytest.fixture
def engine(server: Server, prefix: str) -> Iterator[Engine]:
    engine = connect(server.url(), prefix=prefix)
    yield engine
    engine.close()


@pytest.fixture
def store(server: Server, prefix: str) -> list[str]:
    return ["--url", server.url(), "--prefix", prefix]


def name(delivery: Delivery) -> str:
    """The job's name; the engine keeps it in the head."""
    found: str = delivery.message.headers["headers"]["id"]
    return found


def take(consumer: Consumer, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    while len(found) < count:
        got = consumer.receive(5, limit=count - len(found))
        assert got, f"only {len(found)} of {count} came"
        found += got
    return found


def fill(engine: Engine, queue: str, count: int, **options: Any) -> None:
    """`count` messages as Celery's look in the store; their jobs are queue-0, queue-1, ..."""
    names = [f"{queue}-{n}" for n in range(count)]
    heads = [json.dumps({"type": "shop.charge", "headers": {"id": name}}).encode() for name in names]
    engine.publish(queue, [Message(json.dumps([n]).encode(), head, id=name, **options)
                           for n, (name, head) in enumerate(zip(names, heads, strict=True))])


def bury(engine: Engine, queue: str, count: int) -> None:
    fill(engine, queue, count)
    consumer = engine.consume([queue])
    for delivery in take(consumer, count):
        consumer.dead_letter(delivery, f"failed: {name(delivery)}")
    consumer.close()
    wait_until(lambda: engine.inspector().stats(queue).dead == count, 10, f"{count} dead letters")


def test_a_day_of_an_operator(server: Server, engine: Engine, store: Sequence[str], prefix: str) -> None:
    engine.declare(QueueSpec("mail"))
    bury(engine, "mail", 5)
    fill(engine, "mail", 7)
    fill(engine, "mail", 2, delay=3600)
    consumer = engine.consume(["mail"])
    held = take(consumer, 3)

    [mail] = json.loads(cli("queues", "--json", *store))
    assert [mail[count] for count in ("ready", "delayed", "in_flight", "dead")] == [4, 2, 3, 5]
    assert sum(holder["count"] for holder in mail["holders"]) == 3
    assert mail["holders"][0]["max_delivery_count"] == 1
    assert 0 <= mail["holders"][0]["oldest_age"] < 30
    assert 0 <= mail["oldest_age"] < 30
    [worker] = json.loads(cli("workers", "--json", *store))
    assert (worker["pid"], worker["queues"]) == (os.getpid(), ["mail"])
    assert worker["holder"] == mail["holders"][0]["holder"]
    assert "mail" in cli("queues", "--deliveries", *store)

    dead = json.loads(cli("dead", "ls", "--json", "--queue", "mail", *store))
    assert [each["reason"] for each in dead] == [f"failed: mail-{n}" for n in range(5)]
    assert {each["delivery_count"] for each in dead} == {1}
    shown = json.loads(cli("dead", "show", "--queue", "mail", dead[1]["id"], "--json", *store))
    assert (shown["body"], shown["type"], shown["message_id"]) == ("[1]", "shop.charge", "mail-1")
    assert dead[1]["id"] in cli("dead", "show", "--queue", "mail", dead[1]["id"], *store)

    cli("dead", "rm", "--queue", "mail", dead[0]["id"], "--yes", *store)
    cli("dead", "replay", "--queue", "mail", "--limit", "2", "--yes", *store)
    assert [each["message_id"] for each in json.loads(cli("dead", "ls", "--json", *store))] == ["mail-3", "mail-4"]
    back = take(consumer, 6)
    assert [(name(d), d.count) for d in back[-2:]] == [("mail-1", 1), ("mail-2", 1)]
    for delivery in [*held, *back]:
        consumer.ack(delivery)
    consumer.close()

    waiting = json.loads(cli("delayed", "ls", "--json", *store))
    assert {each["message_id"] for each in waiting} == {"mail-0", "mail-1"}
    cli("delayed", "rm", waiting[0]["id"], "--yes", *store)
    fill(engine, "mail", 3)
    assert json.loads(cli("purge", "--yes", "--queue", "mail", "--json", *store)) == [{"queue": "mail", "removed": 4}]
    cli("dead", "purge", "--yes", "--queue", "mail", *store)
    [mail] = json.loads(cli("queues", "--json", *store))
    assert [mail[count] for count in ("ready", "delayed", "in_flight", "dead")] == [0, 0, 0, 0]
    assert mail["holders"] == []
    assert cli("queues", "nobody", *store, code=1).startswith("streambroker: no queue 'nobody'")
    engine.delete("mail")
    engine.close()
    assert leftovers(server, prefix) == []


def test_hostile_names_do_not_meet(engine: Engine, store: Sequence[str]) -> None:
    for queue in QUEUES:
        bury(engine, queue, 1)
        fill(engine, queue, 2)
    records = {each["queue"]: each for each in json.loads(cli("queues", "--json", *store))}
    assert records.keys() == set(QUEUES)
    assert {(each["ready"], each["dead"]) for each in records.values()} == {(2, 1)}
    for done, queue in enumerate(QUEUES[:6], 1):
        assert len(json.loads(cli("dead", "ls", "--json", "-Q", queue, *store))) == 1
        cli("purge", "--yes", "-Q", queue, *store)
        stats = [engine.inspector().stats(each) for each in QUEUES]
        assert [each.ready for each in stats] == [0] * done + [2] * (len(QUEUES) - done)


def test_prefixes_and_databases_are_apart(server: Server, engine: Engine, store: Sequence[str]) -> None:
    fill(engine, "mail", 1)
    assert json.loads(cli("queues", "--json", "--url", server.url(), "--prefix", "another")) == []
    if not isinstance(server, NatsServer):
        assert json.loads(cli("queues", "--json", "--url", server.url(db=3), *store[2:])) == []
    assert json.loads(cli("queues", "--json", *store[2:], STREAMBROKER_URL=server.url()))[0]["ready"] == 1


def test_thousands_of_dead_letters(engine: Engine, store: Sequence[str]) -> None:
    bury(engine, "mail", 3000)
    assert len(json.loads(cli("dead", "ls", "--json", "-Q", "mail", *store))) == 3000
    assert json.loads(cli("dead", "replay", "-Q", "mail", "--limit", "1500", "--yes", "--json", *store)) == {
        "queue": "mail", "replayed": 1500}
    stats = engine.inspector().stats("mail")
    assert (stats.dead, stats.ready) == (1500, 1500)
    assert json.loads(cli("dead", "purge", "-Q", "mail", "--yes", "--json", *store)) == {
        "queue": "mail", "removed": 1500}
    stats = engine.inspector().stats("mail")
    assert (stats.dead, stats.ready) == (0, 1500)


def test_two_replays_at_once_move_each_dead_letter_once(engine: Engine, store: Sequence[str]) -> None:
    bury(engine, "mail", 1000)
    moved: list[int] = []

    def replay() -> None:
        answer = json.loads(cli("dead", "replay", "-Q", "mail", "--yes", "--json", *store))
        moved.append(answer["replayed"])

    threads = [threading.Thread(target=replay) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = engine.inspector().stats("mail")
    assert (stats.dead, stats.ready, sum(moved)) == (0, 1000, 1000)


def test_transient_queues_show_on_demand(engine: Engine, store: Sequence[str]) -> None:
    engine.declare(QueueSpec("reply", durable=False, expires=60))
    engine.declare(QueueSpec("mail"))
    assert [each["queue"] for each in json.loads(cli("queues", "--json", *store))] == ["mail"]
    assert [each["queue"] for each in json.loads(cli("queues", "--all", "--json", *store))] == ["mail", "reply"]


def test_no_server_and_no_access_are_told_without_secrets(server: Server, fresh: Callable[..., Server]) -> None:
    error = cli("queues", "--url", server.url(user="u", password="hidden", port=free_port()), code=1)
    assert "cannot be reached" in error
    assert "hidden" not in error
    # a nats-server without users takes everybody
    guarded = fresh(users={"somebody": "secret"}) if isinstance(server, NatsServer) else server
    error = cli("queues", "--url", guarded.url(user="nobody", password="hidden"), code=1)
    assert "refuses the credentials" in error
    assert "hidden" not in error


@pytest.mark.only_on("redis", "streams of a nats-server have no types")
def test_a_foreign_key_in_the_place_of_a_queue_costs_that_queue_alone(
        server: Server, engine: Engine, store: Sequence[str], prefix: str) -> None:
    fill(engine, "mail", 1)
    fill(engine, "broken", 1)
    with server.client() as client:
        for key in client.scan_iter(f"{prefix}*broken*"):
            if client.type(key) == b"stream":
                client.delete(key)
                client.set(key, "not a stream")
    assert json.loads(cli("queues", "mail", "--json", *store))[0]["ready"] == 1
    assert "'broken'" in cli("queues", *store, code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_redis_is_durable_and_ends_cleanly(number: int, tmp_path: Path) -> None:
    for size in (1, 2):
        with serve("--dir", str(tmp_path / "data"), "--port", "0", "--json") as (process, told):
            with contextlib.closing(connect(told["url"])) as engine:
                fill(engine, "mail", 1)
                assert engine.ready("mail") == size
            process.send_signal(number)
            _, error = process.communicate(timeout=20)
            assert (process.returncode, error) == (0, "")
            assert not answers_ping(("127.0.0.1", int(port_of(told))))


def test_serve_redis_says_what_is_in_its_way(tmp_path: Path) -> None:
    data, other, file = (str(tmp_path / name) for name in ("data", "other", "file"))
    Path(file).touch()
    with serve("--dir", data, "--port", "0", "--json", "--fsync", "always") as (_, told):
        port = port_of(told)
        assert f"port {port} is in use" in cli("serve", "redis", "--port", port, "--dir", other, code=2)
        assert "belongs to a running server" in cli("serve", "redis", "--port", "0", "--dir", data, code=2)
        assert "--dir" in cli("serve", "redis", "--port", "0", "--dir", file, code=1)


def port_of(told: Any) -> str:
    port: str = told["url"].rpartition(":")[2].partition("/")[0]
    return port


@contextlib.contextmanager
def serve(*argv: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """(process, what it tells) of a `serve redis` that serves; ended afterwards."""
    process = subprocess.Popen([sys.executable, "-u", "-m", "streambroker", "serve", "redis", *argv],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        yield process, json.loads("".join(lines))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=20)
