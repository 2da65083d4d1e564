"""Redis Sentinel: the primary is killed, replaced by plan, or stands still, under load. What was confirmed runs, once;
nothing goes to a primary that is no longer one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration.ledger import Ledger
from integration.load import steady
from integration.rig import CeleryRig
from integration.test_acl import documented_rule
from streambroker import connect
from streambroker.childserver import free_port
from streambroker.dramatiq import RedisStreamsBroker
from streambroker.embedded import ServerProcess
from streambroker.errors import AuthenticationError, ConfigurationError, StoreConnectionError
from streambroker.message import Message
from streambroker.testing.sentinel import Sentinel, SentinelGroup
from streambroker.testing.servers import RedisServer, wait_until

pytestmark = pytest.mark.only_on("redis", "Sentinel is Redis'")

ROOT = Path(__file__).resolve().parent.parent
#: what takes the primary away
KILLED, PLANNED, FROZEN = "killed", "planned", "frozen"
WRITES = ("EVALSHA", "BLPOP", "RPUSH", "SCRIPT")


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Callable[..., SentinelGroup]]:
    """`group(kind, **options)` starts one."""
    started: list[SentinelGroup] = []

    def start(kind: str, **options: Any) -> SentinelGroup:
        started.append(SentinelGroup(kind, **options))
        return started[-1].start()

    yield start
    for each in started:
        each.close()


@contextmanager
def publishing(celery: CeleryRig, rate: float) -> Iterator[None]:
    """From this process and from one that does nothing else, half of the rate each."""
    other = ServerProcess(
        [sys.executable, "-m", "integration.apps.publisher", "other", str(rate / 2)], log=celery.folder / "other.log",
        ready=lambda: any(line.id.startswith("other") for line in celery.ledger.lines("published")),
        env={**celery.settings.environment(), "PYTHONPATH": str(ROOT)})
    other.start()
    try:
        with steady(rate / 2, lambda number: celery.send("work", f"own-{number}")):
            yield
        celery.flag("quiet")
        assert other.wait(20) == 0, other.log_end()
    finally:
        other.kill()


@contextmanager
def watched(server: RedisServer) -> Iterator[list[tuple[float, str]]]:
    """Filled with the writes of clients that the server runs, and when."""
    seen: list[tuple[float, str]] = []

    def watch() -> None:
        for line in monitor.listen():
            if line["command"].startswith("ECHO over"):
                return
            if line["client_type"] != "lua" and line["command"].split(" ")[0].upper() in WRITES:
                seen.append((line["time"], line["command"][:200]))

    with server.client(socket_timeout=None) as watching, watching.monitor() as monitor:
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            with server.client() as client:
                client.echo("over")
            thread.join()


def links(server: RedisServer) -> int:
    with server.client() as client:
        return sum(row["name"] == "streambroker" for row in client.client_list())


def take_away(group: SentinelGroup, how: str) -> tuple[RedisServer, float]:
    """The server that was the primary, and when its end began."""
    old, began = group.primary(), time.time()
    if how == KILLED:
        old.kill()
    elif how == FROZEN:
        old.freeze()
    else:
        group.failover()
    return old, began


def resumes(celery: CeleryRig, after: float) -> float:
    """When the first job ended that was published after that time."""
    def ended() -> float:
        late = {line.id for line in celery.ledger.lines("published") if line.at > after}
        return min((line.at for line in celery.ledger.lines("end") if line.id in late), default=0.0)

    return float(wait_until(ended, 15, "jobs that came after the switch run", pause=0.05))


def follows(group: SentinelGroup, celery: CeleryRig, how: str, pool: str, url: str = "", **options: Any) -> None:
    """Under 100 messages a second, with two jobs that run all the time."""
    celery.use(url or group.url(), master_name=group.name, **options)
    worker = celery.worker(pool=pool, concurrency=8, start=False,
                           options=["--without-mingle", "--without-gossip"]).start(wait=False)
    celery.send("hold", "running-0")
    celery.send("hold", "running-1")
    with publishing(celery, 100):
        celery.ledger.wait("start", 2, 40)
        celery.ledger.wait("end", 100, 20)
        if how == PLANNED:
            with watched(group.primary()) as writes:
                old, began = take_away(group, how)
                new = group.wait_primary(other_than=old)
                switched = time.time()
                assert links(old) == 0
                back = resumes(celery, switched)
            assert writes
            assert [write for write in writes if write[0] > switched] == []
        else:
            old, began = take_away(group, how)
            new = group.wait_primary(other_than=old)
            back = resumes(celery, time.time())
        assert back - began < 10
        if how == FROZEN:
            old.thaw()
            wait_until(lambda: links(old) == 0, 2, "no link to the one that stood still")
        celery.ledger.wait("end", len(celery.ledger.ids("end")) + 50, 20)
    assert links(new) > 0
    assert any(line.id.startswith("other") and line.at > back for line in celery.ledger.lines("published"))
    celery.flag("release")
    celery.ledger.wait_ids("end", celery.ledger.ids("published"), 20)
    verdict = celery.ledger.verdict()
    assert verdict.clean
    assert verdict.doubled == []
    assert worker.alive
    celery.wait_stats(ready=0, in_flight=0, dead=0)


@pytest.mark.parametrize(("how", "pool"), [(KILLED, "threads"), (PLANNED, "eventlet"), (FROZEN, "gevent")])
def test_a_primary_that_goes(kind: str, group: Callable[..., SentinelGroup], celery: CeleryRig, how: str,
                             pool: str) -> None:
    follows(group(kind), celery, how, pool)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_three_minutes_of_failovers(kind: str, group: Callable[..., SentinelGroup], celery: CeleryRig) -> None:
    """One every 20 s, of each kind in turn; a server that went comes back as a replica."""
    servers = group(kind)
    celery.use(servers.url(), master_name=servers.name)
    celery.worker(concurrency=4)
    celery.send("hold", "running")
    with publishing(celery, 100):
        celery.ledger.wait("end", 100, 20)
        for how in (KILLED, PLANNED, FROZEN) * 3:
            old, began = take_away(servers, how)
            servers.wait_primary(other_than=old)
            assert resumes(celery, time.time()) - began < 10
            if how == KILLED:
                old.start()
            elif how == FROZEN:
                old.thaw()
            time.sleep(max(0.0, began + 20 - time.time()))
            wait_until(lambda: servers.is_whole(servers.sentinels[0]), 30, "all follow the new primary", pause=0.2)
    celery.flag("release")
    celery.ledger.wait_ids("end", celery.ledger.ids("published"), 30)
    verdict = celery.ledger.verdict()
    assert verdict.published > 10_000
    assert verdict.clean
    assert verdict.doubled == []


# ---------------------------------------------------------------- the engine

def test_a_planned_failover_loses_nothing(every_kind: str, group: Callable[..., SentinelGroup], prefix: str) -> None:
    """min-replicas-to-write is 0: the old primary takes whatever comes, for ten seconds more."""
    servers = group(every_kind, replicas=1, min_replicas=0)
    engine = connect(servers.url(separator=","), master_name=servers.name, prefix=prefix)
    confirmed: list[str] = []

    def publish(number: int) -> None:
        engine.publish("q", [Message(b"", id=str(number))])
        confirmed.append(str(number))

    with steady(200, publish):
        wait_until(lambda: len(confirmed) > 50, 10, "some are published")
        old, _ = take_away(servers, PLANNED)
        servers.wait_primary(other_than=old)
        count = len(confirmed)
        wait_until(lambda: len(confirmed) > count + 50, 10, "publishing goes on")
    with closing(engine.consume(["q"])) as consumer:
        found: set[str] = set()
        wait_until(lambda: found.update(each.message.id for each in consumer.receive(0.2, 1000)) or
                   set(confirmed) <= found, 5, "all that was confirmed is there")
    engine.close()


def test_who_waits_at_a_primary_that_stands_still_is_woken(kind: str, group: Callable[..., SentinelGroup],
                                                           prefix: str) -> None:
    servers = group(kind)
    engine = connect(servers.url(), master_name=servers.name, prefix=prefix)
    with closing(engine.consume(["q"])) as consumer:
        assert consumer.receive(0.5) == []
        old, began = take_away(servers, FROZEN)
        servers.wait_primary(other_than=old)
        with closing(connect(servers.url(), master_name=servers.name, prefix=prefix)) as other:
            other.publish("q", [Message(b"", id="late")])
        (delivery,) = consumer.receive(5)
        assert delivery.message.id == "late"
        assert time.time() - began < 10
    engine.close()


def test_dramatiq_follows(kind: str, group: Callable[..., SentinelGroup], tmp_path: Path, ledger: Ledger,
                          prefix: str) -> None:
    servers = group(kind)
    options: dict[str, Any] = {"sentinels": [("127.0.0.1", each.port) for each in servers.sentinels],
                               "master_name": servers.name, "prefix": prefix}
    (tmp_path / "flags").mkdir()
    settings = {"broker": "RedisStreamsBroker", "options": options, "ledger": str(ledger.path),
                "flags": str(tmp_path / "flags")}
    log = tmp_path / "dramatiq.log"
    command = ServerProcess(
        [sys.executable, "-m", "dramatiq", "integration.apps.dramatiq_app:broker", "--processes", "1"], log=log,
        ready=lambda: "ready for action" in log.read_text(),
        env={**os.environ, "SB_DRAMATIQ": json.dumps(settings), "PYTHONPATH": str(ROOT)})
    broker = RedisStreamsBroker(**options)
    broker.declare_queue("default")
    command.start(40)
    try:
        from dramatiq import Message as Job

        def send(number: int) -> None:
            broker.enqueue(Job(queue_name="default", actor_name="work", args=(f"job-{number}",), kwargs={}, options={}))
            ledger.published(f"job-{number}")

        with steady(50, send):
            ledger.wait("end", 30, 20)
            old, began = take_away(servers, PLANNED)
            servers.wait_primary(other_than=old)
            ledger.wait("end", len(ledger.ids("published")) + 20, 10)
            assert time.time() - began < 10
        ledger.wait_ids("end", ledger.ids("published"), 10)
        assert ledger.verdict().clean
        assert ledger.verdict().doubled == []
    finally:
        broker.close()
        command.stop()


# ---------------------------------------------------------------- finding it, and what is said when it is not found

@pytest.fixture(scope="module")
def locked(kind: str) -> Iterator[SentinelGroup]:
    """Servers and sentinels with passwords of their own."""
    with SentinelGroup(kind, replicas=1, password="serv3r", sentinel_password="sentin3l") as servers:
        yield servers


def test_both_log_in_with_their_own_password(locked: SentinelGroup, prefix: str) -> None:
    dead = f"127.0.0.1:{free_port()}"
    url = locked.url(separator=",").replace("@", f"@{dead},")
    known = {"master_name": locked.name, "sentinel_kwargs": {"password": "sentin3l"}, "prefix": prefix}
    for place, options in ((url, known), (locked.url(db=2), {**known, "min_other_sentinels": 2})):
        engine = connect(place, **options)
        assert engine.ping() < 1
        assert "serv3r" not in repr(engine)
        assert "sentin3l" not in repr(engine)
        engine.close()


def test_users_with_the_permissions_that_readme_names(locked: SentinelGroup, prefix: str) -> None:
    named = [word.replace("~sb:", f"~{prefix}:").replace("&sb/", f"&{prefix}/") for word in documented_rule()]
    [asking] = re.findall(r"on the sentinels `(-@all [^`]*)`", (ROOT / "README.md").read_text())
    for server in locked.servers:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "jobs", "on", ">of-jobs", *named, "+role")
    for sentinel in locked.sentinels:
        with sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "ask", "on", ">of-ask", *asking.split())
    with closing(connect(locked.url().replace(":serv3r@", "jobs:of-jobs@"), master_name=locked.name, prefix=prefix,
                         sentinel_kwargs={"username": "ask", "password": "of-ask"})) as engine:
        engine.publish("q", [Message(b"", id="1")])
        with closing(engine.consume(["q"])) as consumer:
            (delivery,) = consumer.receive(2)
            consumer.ack_now(delivery)
    for sentinel in locked.sentinels:
        with sentinel.client() as client:
            denied = [entry["object"] for entry in client.acl_log() if entry["username"] == "ask"]
            # redis-py introduces itself, and does not mind
            assert [each for each in denied if not each.startswith("client")] == []


@pytest.mark.parametrize(("options", "kind_of_error", "said"), [
    ({"sentinel_kwargs": {}}, AuthenticationError, "sentinels' own is given in sentinel_kwargs"),
    ({"sentinel_kwargs": {"password": "wrong"}}, AuthenticationError, "refuses the login.*sentinel_kwargs"),
    ({"password": "wrong"}, AuthenticationError, "WRONGPASS|invalid"),
    ({"master_name": "other"}, StoreConnectionError, "know no primary 'other', but 'mymaster': set master_name"),
    ({"min_other_sentinels": 3}, StoreConnectionError, "sees 2 other sentinels, fewer than min_other_sentinels=3"),
    ({"master_name": ""}, ConfigurationError, "needs the option master_name"),
])
def test_what_is_wrong_is_said(locked: SentinelGroup, options: dict[str, object], kind_of_error: type[Exception],
                               said: str) -> None:
    given = {"master_name": locked.name, "sentinel_kwargs": {"password": "sentin3l"}, **options}
    url = locked.url() if "password" not in options else locked.url().replace(":serv3r@", "")
    with pytest.raises(kind_of_error, match=said) as error:
        connect(url, **given).ping()
    assert "serv3r" not in str(error.value)
    assert "sentin3l" not in str(error.value)


def test_no_sentinel_answers() -> None:
    url = f"sentinel-streams://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(StoreConnectionError, match=r"no sentinel answers \(.*refused.*refused.*do they run"):
        connect(url, master_name="mymaster").ping()


def test_a_primary_out_of_reach(kind: str, tmp_path: Path) -> None:
    nobody = free_port()
    sentinel = Sentinel(kind, tmp_path, [f"sentinel monitor far 127.0.0.1 {nobody} 1"], "")
    sentinel.process.start()
    try:
        with pytest.raises(StoreConnectionError, match=rf"127.0.0.1:{nobody}, which the sentinels name as the primary "
                                                       "'far', cannot be used: .*must be reachable from here"):
            connect(f"sentinel-streams://127.0.0.1:{sentinel.port}", master_name="far").ping()
    finally:
        sentinel.process.kill()


def test_the_command_line(locked: SentinelGroup, prefix: str) -> None:
    options = ["--url", f"{locked.url(separator=',')}?master_name={locked.name}", "--prefix", prefix, "--json"]
    for more in ([], ["--option", 'sentinel_kwargs={"password": "sentin3l"}']):
        done = subprocess.run([sys.executable, "-m", "streambroker", "queues", *options, *more], capture_output=True,
                              text=True, timeout=30)
        assert "serv3r" not in done.stdout + done.stderr
        assert done.returncode == (0 if more else 1), done.stderr
