"""Passwords: from the URL, from options, from a provider whose answer changes; and never in what is written."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError

from integration.apps import credentials
from integration.apps.credentials import VARIABLE, FileCredentials
from integration.command import run_celery
from integration.load import steady
from integration.rig import CeleryRig
from streambroker import connect
from streambroker.errors import AuthenticationError, ConfigurationError, StoreConnectionError
from streambroker.message import Message
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until

#: needs to be quoted in a URL, so that both its forms are looked for
SECRET = "s3cr3t:p@ss/w%rd"
PROVIDER = "integration.apps.credentials.FileCredentials"


def shows_no_secret(text: str) -> None:
    for form in (SECRET, quote(SECRET, safe=""), SECRET.partition(":")[0]):
        assert form not in text


@pytest.fixture
def locked(fresh: Callable[..., RedisServer]) -> RedisServer:
    """A server that asks for the password."""
    return fresh(password=SECRET)


def url_of(server: RedisServer, password: str = SECRET) -> str:
    return f"redis-streams://:{quote(password, safe='')}@127.0.0.1:{server.port}/0"


# ---------------------------------------------------------------- logging in

@pytest.mark.parametrize("way", ["URL", "option", "user and URL", "provider", "path of a provider"])
def test_ways_to_log_in(locked: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, celery: CeleryRig,
                        way: str) -> None:
    (tmp_path / "credentials").write_text(f"default {SECRET}")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "credentials"))
    bare = f"redis-streams://127.0.0.1:{locked.port}/0"
    url, options = {
        "URL": (url_of(locked), {}),
        "option": (bare, {"password": SECRET}),
        "user and URL": (url_of(locked).replace("://:", "://default:"), {}),
        "provider": (bare, {"credential_provider": FileCredentials()}),
        "path of a provider": (f"{bare}?credential_provider={PROVIDER}", {}),
    }[way]
    celery.use(url, **options)
    celery.send("work", "let-in")
    with Connection(url_of(locked), transport_options={"global_keyprefix": celery.prefix}) as connection:
        assert connection.default_channel.queue_declare("celery", passive=True).message_count == 1
    engine = connect(url, prefix=celery.prefix, **options)
    assert engine.ready("celery") == 1
    shows_no_secret(repr(engine))
    engine.close()


def test_a_provider_that_is_not_there_is_told(server: RedisServer) -> None:
    for path in ("nowhere.at.All", "integration.apps.credentials.Absent", "plain"):
        with pytest.raises(ConfigurationError, match=r"package\.module\.Class"):
            connect(server.url(), credential_provider=path)


def test_a_password_that_changes_reaches_every_connection(fresh: Callable[..., RedisServer], tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch, celery: CeleryRig) -> None:
    """Rows 64, 65: publishing, consuming, remote control, events, delays and the keeper log in anew with what the
    provider says then."""
    server, file = fresh(), tmp_path / "credentials"
    monkeypatch.setenv(VARIABLE, str(file))

    def rotate(number: int) -> None:
        with server.client() as client:
            file.write_text(f"app token-{number}")
            client.acl_setuser("app", enabled=True, reset_passwords=True, passwords=[f"+token-{number}"],
                               keys=["*"], channels=["*"], commands=["+@all"])
            client.client_kill_filter(user="app")

    rotate(0)
    celery.use(server.url(), conf={"worker_send_task_events": True}, credential_provider=PROVIDER)
    workers = [celery.worker(pool, start=False, pool=pool) for pool in ("prefork", "gevent")]
    celery.start(*workers)
    for number in range(1, 4):
        rotate(number)
        celery.send("work", f"now-{number}")
        celery.send("work", f"later-{number}", countdown=0.5)
        celery.ledger.wait("end", 2 * number, 10)
        assert len(celery.app.control.ping(timeout=5, limit=2)) == 2
    for worker in workers:
        assert worker.alive
        assert worker.count("WRONGPASS|NOAUTH|AuthenticationError") == 0

    # a provider that fails is asked again
    good = file.read_text()
    file.write_text("half")
    with server.client() as client:
        client.client_kill_filter(user="app")
    for worker in workers:
        worker.wait_log("no credentials: ValueError", timeout=20)
    with Connection(server.url(), credential_provider=PROVIDER) as connection, \
            pytest.raises(connection.connection_errors, match="no credentials: ValueError"):
        connection.ensure_connection(max_retries=1)
    file.write_text(good)
    celery.send("work", "in the end")
    celery.ledger.wait_ids("end", ["in the end"], 15)
    celery.finish()


@pytest.mark.only_on("nats", "the same for a Redis is above")
@pytest.mark.parametrize(("every", "times"), [
    (2, 4), pytest.param(20, 6, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
def test_a_login_that_changes_all_the_time_on_a_nats_server(
        fresh: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, celery: CeleryRig,
        every: float, times: int) -> None:
    """Busy, with the old one taken away as soon as the new one holds; and idle, when all have changed that a process
    knew. Nothing is lost or runs twice."""
    file = tmp_path / "credentials"
    monkeypatch.setenv(VARIABLE, str(file))
    server = fresh(users={"first": "token-first"})
    file.write_text("first token-first")
    celery.use(f"jetstream://127.0.0.1:{server.port}", credential_provider=PROVIDER)
    worker = celery.worker(pool="threads", concurrency=4)

    def rotate(name: str) -> None:
        before = dict(server.users)
        server.set_users({**before, name: f"token-{name}"})
        wait_until(lambda: logs_in(server, name), 5, "the new login holds")
        file.write_text(f"{name} token-{name}")
        server.set_users({name: f"token-{name}"})
        wait_until(lambda: not logs_in(server, *before), 5, "the old login is gone")

    with steady(20, lambda number: celery.send("work", f"busy-{number}")):
        for number in range(times):
            time.sleep(every)
            rotate(f"busy-{number}")
    for number in range(2):
        rotate(f"idle-{number}")
        time.sleep(every)
    celery.send("work", "after a rest")
    celery.ledger.wait_ids("end", celery.ledger.ids("published"), 15)
    verdict = celery.ledger.verdict()
    assert verdict.published > 20 * every * times / 2
    assert verdict.clean
    assert verdict.doubled == []
    assert len(celery.app.control.ping(timeout=5, limit=1)) == 1
    assert worker.alive
    assert worker.count("refused the login|AuthenticationError") == 0


def logs_in(server: NatsServer, *users: str) -> bool:
    """Whether any of these users, with its own password, still or already can."""
    for user in users:
        engine = connect(f"jetstream://{user}:token-{user}@127.0.0.1:{server.port}")
        try:
            engine.ping(1)
        except StoreConnectionError:
            continue
        else:
            return True
        finally:
            engine.close()
    return False


@pytest.mark.only_on("nats", "is about what nats-py takes")
@pytest.mark.parametrize("way", ["provider", "path of a provider", "functions", "Kombu's own"])
def test_ways_to_log_in_that_are_asked_each_time(way: str, fresh: Callable[..., NatsServer], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    file = tmp_path / "credentials"
    file.write_text("jobs of-jobs")
    monkeypatch.setenv(VARIABLE, str(file))
    server = fresh(users={"jobs": "of-jobs"})
    url = f"jetstream://127.0.0.1:{server.port}"
    options: dict[str, Any] = {
        "provider": {"credential_provider": FileCredentials()}, "path of a provider": {"credential_provider": PROVIDER},
        "functions": {"user": credentials.user, "password": credentials.password}, "Kombu's own": {}}[way]
    given = {"userid": "jobs", "password": credentials.password} if way == "Kombu's own" else {}
    with Connection(url, transport_options={"prefix": prefix, **options}, **given) as connection:
        connection.default_channel.queue_declare("q")
        engine = connection.transport.shared.engine
        for _ in range(3):
            engine.publish("q", [Message(b"x")])
    file.write_text("half")
    with pytest.raises(AuthenticationError, match="no credentials: ValueError"):
        connect(url, **{"credential_provider": PROVIDER, **options}).ping()


# ---------------------------------------------------------------- what is written

def test_a_refused_log_in_is_told_at_once(locked: RedisServer) -> None:
    """To a publisher, also in a process that has worker code in it."""
    importlib.import_module("celery.worker.consumer.consumer")
    began = time.monotonic()
    for broker in (url_of(locked, "wrong"), locked.url().replace(f":{SECRET}@", "")):
        app = Celery("refused", broker=broker, set_as_current=False)
        for attempt in (lambda app=app: app.send_task("any"), app.control.ping, app.connection().ensure_connection):
            with pytest.raises(AccessRefused, match=r"invalid|[Aa]uthentication required"):
                attempt()
        app.close()
    assert time.monotonic() - began < 2


def test_a_refused_log_in_is_told_without_the_password(locked: RedisServer, prefix: str) -> None:
    """As an error of ours, of Kombu and of Celery, with everything that a traceback shows."""
    engine = connect(url_of(locked, "wrong-" + SECRET), prefix=prefix)
    connection = Connection(url_of(locked, "wrong-" + SECRET))
    app = Celery("refused", broker=url_of(locked, "wrong-" + SECRET), set_as_current=False)
    for attempt in (engine.ping, lambda: engine.ready("q"), connection.connect, lambda: app.send_task("any")):
        with pytest.raises((AuthenticationError, OperationalError, *connection.connection_errors),
                           match=r"WRONGPASS|invalid") as refused:
            attempt()
        shows_no_secret("".join(traceback.format_exception(refused.value)))
        shows_no_secret(repr(refused.value))
    engine.close()
    app.close()


def test_nothing_that_is_printed_shows_the_password(locked: RedisServer) -> None:
    with Connection(url_of(locked)) as connection:
        connection.connect()
        channel = connection.channel()
        engine = connection.transport.shared.engine
        things: list[Any] = [connection, channel, connection.transport, connection.transport.shared, engine,
                             engine.address, engine.settings, engine.commands, connection.transport.endpoint(),
                             connection.as_uri()]
        for thing in things:
            shows_no_secret(repr(thing))
            shows_no_secret(str(thing))
        # connections are pickled by pools of processes
        assert pickle.loads(pickle.dumps(connection)).password == SECRET


def test_a_life_of_a_worker_shows_the_password_nowhere(locked: RedisServer, celery: CeleryRig,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    """Banner, debug log, lost links, a server that is away, a new password, events, reports, inspection, the command
    line: all that is written is searched."""
    celery.use(url_of(locked), backend=url_of(locked).replace("redis-streams", "redis")[:-1] + "1",
               reconnect_timeout=0.5)
    seen: list[str] = []
    with caplog.at_level(logging.DEBUG):
        workers = [celery.worker(pool, start=False, pool=pool, options=["-E", "--loglevel", "DEBUG"])
                   for pool in ("prefork", "gevent")]
        celery.start(*workers)
        celery.send("work", "first")
        celery.send("failing", "failing")
        celery.ledger.wait("end", 1, 10)
        seen += run_celery(celery.settings, "report", "status", "inspect stats", "inspect conf", "inspect report",
                           "amqp queue.declare celery", "list bindings", "events --help")
        locked.stop()
        for worker in workers:
            worker.wait_log("Connection to broker lost", timeout=20)
            worker.wait_log("Cannot connect to|Trying again", timeout=20)
        locked.start()
        celery.send("work", "second")
        celery.ledger.wait_ids("end", ["second"], 20)
        with locked.client() as client:
            client.config_set("requirepass", "another")
            client.client_kill_filter(_type="normal", skipme=True)
            client.client_kill_filter(_type="pubsub", skipme=True)
            for worker in workers:
                worker.wait_log("WRONGPASS|invalid username-password", timeout=20)
            client.config_set("requirepass", SECRET)
        celery.send("work", "third")
        celery.ledger.wait_ids("end", ["third"], 20)
        for command in ("queues", "workers", "dead ls", "delayed ls", "queues --json", "queues -Q nowhere"):
            done = subprocess.run([sys.executable, "-m", "streambroker", *command.split(), "--url", url_of(locked),
                                   "--prefix", celery.prefix], capture_output=True, text=True, timeout=30)
            seen += [done.stdout, done.stderr]
    celery.finish()
    seen += [worker.text() for worker in workers] + [caplog.text]
    assert all(seen[:8])
    for text in seen:
        shows_no_secret(text)
