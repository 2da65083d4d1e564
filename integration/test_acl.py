"""A user with no more than the permissions that README names can do everything: workers, producers, remote control,
events, delays, dead letters, the command line."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import redis
from kombu import Connection, Exchange, Producer, Queue

from integration.command import run_celery
from integration.rig import CeleryRig
from integration.worker import ROOT
from streambroker import connect
from streambroker.errors import StoreError
from streambroker.message import Message, QueueSpec
from streambroker.testing.servers import RedisServer, wait_until

USER, PASSWORD = "jobs", "of-jobs"
ENGINE = ROOT / "streambroker" / "engines" / "redis_streams"


def documented_rule() -> list[str]:
    """The words of README's rule, without the name and the password."""
    readme = (ROOT / "README.md").read_text()
    [line] = re.findall(r"^```\nACL SETUSER jobs on >secret (.*)\n```$", readme, re.MULTILINE)
    return str(line).split()


@pytest.fixture
def guarded(fresh: Callable[..., RedisServer]) -> RedisServer:
    server = fresh()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", USER, "on", f">{PASSWORD}", *documented_rule())
        client.config_resetstat()
    return server


def url_of(server: RedisServer) -> str:
    return server.url(user=USER, password=PASSWORD)


def denials(server: RedisServer) -> list[str]:
    """What the user was refused; redis-py introduces itself, and does not mind."""
    with server.client() as client:
        return [f"{entry['reason']}: {entry['object']} ({entry['context']})" for entry in client.acl_log()
                if entry["username"] == USER and not entry["object"].startswith("client")]


def day_of_a_producer(url: str) -> None:
    with Connection(url) as connection:
        channel = connection.channel()
        Queue("celery", Exchange("media", "topic"), routing_key="image.*")(channel).declare()
        Producer(channel).publish([], routing_key="unused")
        channel.queue_delete("unused")


def day_of_workers(celery: CeleryRig) -> None:
    """Tasks of all kinds, events, remote control, a worker that is killed."""
    ledger = celery.ledger
    one = celery.worker("one", options=["-E"])
    two = celery.worker("two", pool="threads", options=["-E"])
    seen: set[str] = set()

    def watch() -> None:
        with celery.app.connection_for_read() as connection:
            receiver = celery.app.events.Receiver(connection, handlers={"*": lambda event: seen.add(event["type"])})
            for _ in receiver.itercapture(limit=None, timeout=None):
                if {"worker-heartbeat", "task-succeeded"} <= seen:
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert celery.app.tasks["add"].delay(1, 2).get(timeout=10) == 3
    celery.send("work", "prior", priority=9)
    celery.send("work", "later", countdown=0.5)
    celery.send("retrying", "again", 1, countdown=0.3)
    celery.send("work", "by topic", exchange="media", routing_key="image.small")
    celery.send("rejecting", "requeued", True, 1)
    celery.send_all("work", [f"many-{number}" for number in range(50)])
    names = ["prior", "later", "again", "by topic", "requeued", *(f"many-{number}" for number in range(50))]
    ledger.wait_ids("end", names, 20)
    watcher.join(10)
    assert not watcher.is_alive()

    control = celery.app.control
    assert len(control.ping(timeout=5, limit=2)) == 2
    control.add_consumer("extra", reply=True, timeout=5, limit=2)
    celery.send("work", "extra", queue="extra")
    ledger.wait_ids("end", ["extra"], 10)
    control.cancel_consumer("extra", reply=True, timeout=5, limit=2)
    far = celery.app.tasks["work"].apply_async(("never",), countdown=600)
    far.revoke()
    wait_until(lambda: celery.stats().delayed == 0, 5, "the revoked one is gone")

    for name in ("dead", "forwarded"):
        celery.send("rejecting", name, queue="celery" if name == "dead" else "with-dlx")
    celery.wait_stats(dead=1)
    celery.wait_stats("graves", ready=1)
    held = celery.send_all("hold", [f"held-{number}" for number in range(4)])
    ledger.wait_ids("start", held, 10)
    one.kill()
    celery.flag("release")
    ledger.wait_ids("end", held, 20)
    two.stop()


def day_of_an_operator(celery: CeleryRig, url: str) -> None:
    """The command line, ours and Celery's."""
    celery.send("work", "waits")
    celery.app.tasks["work"].apply_async(("delayed",), countdown=600, task_id="far")
    [dead] = celery.engine.inspector().dead("celery")
    for line in ("queues", "queues --deliveries --all", "workers", "dead ls", f"dead show {dead.id}",
                 f"dead replay -Q celery {dead.id} --yes", "delayed ls", "delayed rm far --yes",
                 "purge -Q celery --yes", "dead purge -Q celery --yes"):
        done = subprocess.run([sys.executable, "-m", "streambroker", *line.split(), "--url", url],
                              capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    run_celery(celery.settings, "purge -f", "list bindings", "amqp queue.declare tried", "amqp queue.delete tried",
               "amqp exchange.declare tried topic", "amqp exchange.delete tried False")


def rest_of_the_engine(url: str) -> None:
    """What Celery has no word for."""
    engine = connect(url)
    engine.declare(QueueSpec("short", max_length=3, message_ttl=60.0))
    engine.publish("short", [Message(b"%d" % number) for number in range(5)])
    consumer = engine.consume(["short"])
    [first, second] = consumer.receive(5, 2)
    consumer.nack(first, delay=0.1)
    consumer.dead_letter(second, "as asked")
    consumer.receive(0, 0)
    wait_until(lambda: engine.inspector().stats("short").dead == 1, 5, "the dead letter")
    [letter] = engine.inspector().dead("short")
    engine.inspector().dead_remove("short", [letter.id])
    engine.declare(QueueSpec("brief", durable=False, expires=0.3))
    table = engine.table("anything")
    table.put("row", "1", queue="brief")
    wait_until(lambda: "brief" not in engine.inspector().queues(), 10, "the transient queue is gone")
    table.delete(["row"])
    consumer.close()
    engine.delete("short")
    engine.close()


def test_the_documented_user_can_do_everything(guarded: RedisServer, plain_celery: CeleryRig) -> None:
    """Row 66."""
    celery, url = plain_celery, url_of(guarded)
    celery.use(url, backend="rpc://", arguments={"with-dlx": {"x-dead-letter-exchange": "",
                                                              "x-dead-letter-routing-key": "graves"}},
               queues=["celery", "with-dlx", "graves-keeper"])
    day_of_a_producer(url)
    day_of_workers(celery)
    celery.app.backend.result_consumer.stop()
    day_of_an_operator(celery, url)
    rest_of_the_engine(url)
    assert denials(guarded) == []


def test_nothing_is_allowed_in_vain() -> None:
    """Each command of the rule is one that the engine, or redis-py for it, sends."""
    sources = [path.read_text() for path in (*ENGINE.glob("*.py"), *ENGINE.glob("lua/*.lua"))]
    words = {word for source in sources for word in re.findall(r"['\"]([A-Z]+)['\"]", source)} | {"SELECT", "CLIENT"}
    allowed = {word[1:].partition("|")[0].upper() for word in documented_rule() if word.startswith("+")}
    assert allowed - words == set()


def test_the_documented_user_can_do_nothing_else(guarded: RedisServer) -> None:
    with guarded.client(username=USER, password=PASSWORD) as client:
        for command in (("GET", "elsewhere"), ("SET", "sb2:x", "1"), ("FLUSHALL",), ("KEYS", "*"),
                        ("CONFIG", "GET", "*"), ("PUBLISH", "elsewhere", "x"), ("SCRIPT", "FLUSH"), ("CLIENT", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)


@pytest.mark.parametrize("missing", ["xadd", "evalsha"])
def test_a_permission_that_a_publisher_lacks_is_told(guarded: RedisServer, plain_celery: CeleryRig,
                                                     missing: str) -> None:
    plain_celery.use(url_of(guarded))
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", USER, f"-{missing}")
        with pytest.raises(StoreError, match=f"lacks a permission.*{missing}"):
            plain_celery.app.tasks["work"].apply_async(("refused",), retry=False)
        client.execute_command("ACL", "SETUSER", USER, f"+{missing}")
    plain_celery.send("work", "at last")
    plain_celery.wait_stats(ready=1)


@pytest.mark.parametrize("missing", ["xreadgroup", "psubscribe"])
def test_a_permission_that_a_worker_lacks_is_told(guarded: RedisServer, plain_celery: CeleryRig, missing: str) -> None:
    """In its log; it goes on as soon as it has it."""
    celery = plain_celery
    celery.use(url_of(guarded))
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", USER, f"-{missing}")
        worker = celery.worker(pool="threads", start=False)
        worker.start(wait=False)
        worker.wait_log(f"permission.*{missing}", timeout=20)
        client.execute_command("ACL", "SETUSER", USER, f"+{missing}")
    celery.send("work", "at last")
    celery.ledger.wait_ids("end", ["at last"], 20)
    worker.stop()
