"""What Celery's users see and steer works as on any broker: every remote command, the command line, events, mingle,
gossip, Flower, beat."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.worker.control import Panel

from integration.command import celery_process, run_celery
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server, scheme
from streambroker.embedded import free_port
from streambroker.testing.servers import wait_until

# on Valkey alone unless `--server` asks for more: the adapter does most of it, and it takes minutes

HOST = socket.gethostname()
NODES = [f"one@{HOST}", f"two@{HOST}"]

#: the longest that a remote command may take, of which nothing is waiting for a time-out
SOON = 2.0
#: arguments of the commands that need some, harmless ones
ARGUMENTS: dict[str, dict[str, Any]] = {
    "add_consumer": {"queue": "added"},
    "autoscale": {"max": 4, "min": 2},
    "cancel_consumer": {"queue": "never-consumed"},
    "hello": {"from_node": "test@nowhere", "revoked": {}},
    "query_task": {"ids": ["none"]},
    "rate_limit": {"task_name": "add", "rate_limit": "1000/s"},
    "revoke": {"task_id": "none"},
    "revoke_by_stamped_headers": {"headers": {"stamp": ["none"]}},
    "terminate": {"signal": "SIGTERM", "task_id": "none"},
    "time_limit": {"task_name": "add", "hard": 300.0, "soft": 200.0},
}
#: what they answer without a library or setting that has nothing to do with the broker
REFUSED = {"objgraph": "objgraph library", "autoscale": "not enabled"}


@pytest.fixture(scope="module")
def crew(servers: Callable[[str], Server], kind: str,
         tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryRig]:
    """Two workers, `one` and `two`, that all tests of this module share."""
    folder, server = tmp_path_factory.mktemp("surface"), servers(kind)
    rig = CeleryRig(folder, Ledger(folder / "ledger.jsonl"), f"surface-{kind}")
    rig.use(server.url(), backend=server.result_url(), queues=["celery", "other"],
            conf={"worker_send_task_events": True, "task_send_sent_event": True, "worker_pool_restarts": True})
    try:
        rig.start(rig.worker("one", start=False), rig.worker("two", start=False))
        yield rig
        assert all(worker.alive for worker in rig.workers)
    finally:
        rig.close()


def ask(crew: CeleryRig, verb: str, nodes: list[str] = NODES, **arguments: Any) -> dict[str, Any]:
    """The answer of each node, asked over the remote control; returns as soon as all have answered."""
    replies = crew.app.control.broadcast(verb, arguments=arguments, reply=True, destination=nodes, timeout=10,
                                         limit=len(nodes))
    return {node: answer for reply in replies for node, answer in reply.items()}


# ---------------------------------------------------------------- remote commands

@pytest.mark.parametrize("verb", sorted(set(Panel.meta) - {"shutdown", "election"}))
def test_every_remote_command_answers_soon(crew: CeleryRig, verb: str) -> None:
    """Row 59. Celery's workers do not survive an election of two; for one of three see below."""
    began = time.monotonic()
    answers = ask(crew, verb, **ARGUMENTS.get(verb, {}))
    took = time.monotonic() - began
    assert sorted(answers) == NODES
    for answer in answers.values():
        error = answer.get("error", "") if isinstance(answer, dict) else ""
        assert not error or REFUSED.get(verb, "-") in error
    assert took < SOON


def test_what_inspect_tells_is_so(crew: CeleryRig) -> None:
    """A running and a waiting task, on the worker that has them."""
    running = crew.send("hold", "seen", "unseen", queue="other")
    crew.ledger.wait_ids("start", ["seen"], 10)
    inspect = crew.app.control.inspect(NODES, timeout=5, limit=2)
    active = [task for tasks in inspect.active().values() for task in tasks]
    assert [(task["id"], task["name"], task["args"]) for task in active] == [(running.id, "hold", ["seen", "unseen"])]
    [state] = [tasks[running.id] for tasks in inspect.query_task(running.id).values() if tasks]
    assert state[0] == "active"
    queues = {node: sorted(queue["name"] for queue in found) for node, found in inspect.active_queues().items()}
    assert all({"celery", "other"} <= set(found) for found in queues.values())
    assert {stats["broker"]["transport"] for stats in inspect.stats().values()} == {scheme(crew.settings.broker)}
    assert all("work" in tasks for tasks in inspect.registered().values())
    crew.flag("unseen")
    crew.ledger.wait_ids("end", ["seen"], 10)


def test_a_queue_is_consumed_and_left_while_the_worker_runs(crew: CeleryRig) -> None:
    answers = ask(crew, "add_consumer", queue="later")
    assert all("add consumer" in answer["ok"] for answer in answers.values())
    crew.send("work", "later-1", queue="later")
    crew.ledger.wait_ids("end", ["later-1"], 10)
    answers = ask(crew, "cancel_consumer", queue="later")
    assert all("no longer consuming" in answer["ok"] for answer in answers.values())
    crew.send("work", "later-2", queue="later")
    crew.send("work", "not-later")
    crew.ledger.wait_ids("end", ["not-later"], 10)
    assert crew.wait_stats("later", ready=1).in_flight == 0
    assert "later-2" not in crew.ledger.ids("start")
    ask(crew, "add_consumer", queue="later")
    crew.ledger.wait_ids("end", ["later-2"], 10)


def test_a_rate_limit_is_kept(crew: CeleryRig) -> None:
    names = [f"limited-{number}" for number in range(6)]
    ask(crew, "rate_limit", task_name="work", rate_limit="2/s")
    try:
        crew.send_all("work", names)
        crew.ledger.wait_ids("end", names, 20)
    finally:
        ask(crew, "rate_limit", task_name="work", rate_limit="0")
    times = [line.at for line in crew.ledger.lines("start") if line.id in names]
    # each worker has two a second; of six at least three are on one of them
    assert max(times) - min(times) > 0.9
    assert len(times) == len(names)


def test_a_waiting_task_is_revoked(crew: CeleryRig) -> None:
    """One that a worker has and one that is still in the queue."""
    names = [f"busy-{number}" for number in range(4)]
    crew.send_all("hold", names, "unbusy")
    crew.ledger.wait_ids("start", names, 10)
    waiting = [crew.send("work", f"revoked-{number}") for number in range(6)]
    crew.app.control.revoke([result.id for result in waiting], reply=True, destination=NODES, timeout=10, limit=2)
    crew.send("work", "unrevoked")
    crew.flag("unbusy")
    crew.ledger.wait_ids("end", [*names, "unrevoked"], 15)
    crew.wait_stats(ready=0, in_flight=0)
    assert not [name for name in crew.ledger.ids("start") if name.startswith("revoked-")]
    assert {result.state for result in waiting} == {"REVOKED"}


def test_a_running_task_is_terminated(crew: CeleryRig) -> None:
    result = crew.send("hold", "endless", "never")
    crew.ledger.wait_ids("start", ["endless"], 10)
    crew.ledger.killed([line.pid for line in crew.ledger.lines("start") if line.id == "endless"])
    result.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: result.state == "REVOKED", 10, "it is revoked")
    crew.wait_stats(ready=0, in_flight=0, dead=0)
    crew.send("work", "after-endless")
    crew.ledger.wait_ids("end", ["after-endless"], 10)


@pytest.mark.parametrize("limits", [{"time_limit": 1}, {"soft_time_limit": 1}], ids=["hard", "soft"])
def test_a_time_limit_ends_a_task(crew: CeleryRig, limits: dict[str, float]) -> None:
    name = f"too-long-{next(iter(limits))}"
    result = crew.send("hold", name, "never", **limits)
    wait_until(lambda: result.state == "FAILURE", 15, "it fails")
    assert "TimeLimitExceeded" in repr(result.result)
    crew.wait_stats(ready=0, in_flight=0, dead=0)
    assert [line.id for line in crew.ledger.lines("start")].count(name) == 1


def test_a_worker_is_shut_down_from_afar(crew: CeleryRig) -> None:
    third = crew.worker("third")
    crew.app.control.shutdown(destination=[f"third@{HOST}"])
    wait_until(lambda: not third.alive, 10, "it ends")
    assert sorted(ask(crew, "ping")) == NODES
    third.end()
    crew.workers.remove(third)


# ---------------------------------------------------------------- events, mingle, gossip

def test_events_tell_the_life_of_a_task(crew: CeleryRig) -> None:
    seen: dict[str, list[str]] = {}
    workers: set[str] = set()
    ready, over = threading.Event(), threading.Event()

    def note(event: dict[str, Any]) -> None:
        if event["type"].startswith("task-"):
            seen.setdefault(event["uuid"], []).append(event["type"])
        else:
            workers.add(event["hostname"])
        ready.set()  # the receiver listens: heartbeats come every 2 s

    def listen() -> None:
        with crew.app.connection_for_read() as connection:
            receiver = crew.app.events.Receiver(connection, handlers={"*": note})
            for _ in receiver.itercapture(limit=None, timeout=None, wakeup=True):
                if over.is_set():
                    return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert ready.wait(10)
        good, bad = crew.send("work", "eventful"), crew.send("failing", "eventful-bad")
        wait_until(lambda: len(seen.get(good.id, ())) == len(seen.get(bad.id, ())) == 4, 10, "four events of each")
        wait_until(lambda: workers == set(NODES), 10, "heartbeats of both")
    finally:
        over.set()
        listener.join(10)
    assert sorted(seen[good.id]) == ["task-received", "task-sent", "task-started", "task-succeeded"]
    assert sorted(seen[bad.id]) == ["task-failed", "task-received", "task-sent", "task-started"]
    # what one worker tells comes in order
    assert [kind for kind in seen[good.id] if kind != "task-sent"] == sorted(set(seen[good.id]) - {"task-sent"})


def test_a_new_worker_learns_what_was_revoked(crew: CeleryRig) -> None:
    """Mingle."""
    crew.app.control.revoke("long-ago", reply=True, destination=NODES, timeout=10, limit=2)
    fourth = crew.worker("fourth")
    try:
        assert fourth.count("mingle: sync complete") == 1
        assert "long-ago" in ask(crew, "revoked", [f"fourth@{HOST}"])[f"fourth@{HOST}"]
    finally:
        fourth.stop()
        crew.workers.remove(fourth)


def test_workers_hear_of_each_other(crew: CeleryRig) -> None:
    """Gossip. (An election ends a worker when an answer to its own vote comes before the votes of others, on any
    broker: Celery does not expect that.)"""
    third = crew.worker("third-of-three")
    try:
        for worker in crew.workers[:2]:
            worker.wait_log("sync with third-of-three@")
    finally:
        third.stop()
        crew.workers.remove(third)


# ---------------------------------------------------------------- the command line

def test_the_command_line(crew: CeleryRig) -> None:
    status, report, ping, limit, bindings, stats = run_celery(
        crew.settings, "status", "report", "inspect ping --timeout 5", "control rate_limit add 100/s", "list bindings",
        "inspect stats --json")
    assert all(f"{node}: OK" in status for node in NODES)
    assert f"streambroker {scheme(crew.settings.broker)}" in report
    assert ping.count("pong") == 2
    assert limit.count("new rate limit set successfully") == 2
    assert {"celery", "other"} <= {line.split()[0] for line in bindings.splitlines() if line}
    assert sorted(json.loads(stats)) == NODES


def test_call_result_and_purge(crew: CeleryRig) -> None:
    [called] = run_celery(crew.settings, "call add --args '[2, 3]'")
    task_id = called.split()[-1]
    wait_until(lambda: crew.app.AsyncResult(task_id).ready(), 10, "the result")
    names = {"abandoned": 3, "forsaken": 4}
    for queue, count in names.items():
        crew.send_all("work", [f"{queue}-{number}" for number in range(count)], queue=queue)
    crew.send_all("work", ["forsaken-soon", "forsaken-late"], queue="forsaken", countdown=600)
    result, purged = run_celery(crew.settings, f"result {task_id}", "purge -f -Q abandoned,forsaken")
    assert result.strip() == "5.0" or result.strip() == "5"
    assert "Purged 9 messages from 2 known task queues" in purged
    for queue in names:
        crew.wait_stats(queue, ready=0, delayed=0)


def test_amqp(crew: CeleryRig) -> None:
    """`celery amqp`: every verb, with what another process of the same command left."""
    outputs = run_celery(
        crew.settings, "amqp exchange.declare tried topic", "amqp queue.declare tries",
        "amqp queue.bind tries tried 'a.#'", "amqp basic.publish hello tried a.b", "amqp queue.declare tries True",
        "amqp basic.get tries", "amqp basic.publish again tried a.c", "amqp basic.publish astray tried b.c",
        "amqp queue.purge tries", "amqp queue.delete tries", "amqp exchange.delete tried False")
    assert "queue:tries messages:1" in outputs[4]
    assert "hello" in outputs[5]
    # what `basic.get` took went back when that command ended
    assert "2" in outputs[8]
    with crew.app.connection_for_write() as connection:
        bindings = {binding["destination"] for binding in connection.manager.get_bindings()}
    assert "tries" not in bindings


def test_events_dump(crew: CeleryRig) -> None:
    dump = celery_process(crew.settings, "events --dump", crew.folder / "events.log", lambda: False)
    dump.launch()
    try:
        wait_until(lambda: "heartbeat" in dump.log.read_text(), 20, "a worker's heartbeat in its output", pause=0.1)
        result = crew.send("work", "dumped")
        wait_until(lambda: result.id in dump.log.read_text(), 10, "the task in its output", pause=0.1)
        wait_until(lambda: "succeeded" in dump.log.read_text(), 10, "its end in its output", pause=0.1)
    finally:
        assert dump.stop() in (0, -signal.SIGTERM)


# ---------------------------------------------------------------- beat, Flower

def test_beat(celery: CeleryRig, server: Server) -> None:
    celery.use(server.url(), conf={"beat_schedule": {
        "often": {"task": "work", "schedule": 0.3, "args": ["tick"]},
        "counted": {"task": "work", "schedule": 0.5, "args": ["tock"], "options": {"countdown": 0.5}}}})
    worker = celery.worker(pool="threads")
    log = celery.folder / "beat.log"
    beat = celery_process(celery.settings, f"beat --schedule {celery.folder / 'schedule'}", log, lambda: False)
    beat.launch()
    try:
        wait_until(lambda: min(sum(line.id == name for line in celery.ledger.lines("end"))
                               for name in ("tick", "tock")) >= 3, 20, "three of each", pause=0.1)
    finally:
        assert beat.stop() == 0
    assert "ERROR" not in log.read_text()
    worker.stop()


def test_flower(crew: CeleryRig) -> None:
    """Rows 105, 106: workers and tasks are shown, tasks can be looked up, and a worker steered."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"

    def get(path: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(base + path, data, timeout=10) as answer:
            return json.loads(answer.read())

    def ready() -> bool:
        try:
            return len(get("/api/workers?refresh=1")) == 2
        except (OSError, ValueError):
            return False

    flower = celery_process(crew.settings, f"flower --address=127.0.0.1 --port={port}", crew.folder / "flower.log",
                            ready, {"FLOWER_UNAUTHENTICATED_API": "1"})
    flower.start(40)
    try:
        workers = get("/api/workers")
        assert sorted(workers) == NODES
        assert all({"celery", "other"} <= {queue["name"] for queue in worker["active_queues"]}
                   for worker in workers.values())
        result = crew.send("work", "flowery")
        crew.ledger.wait_ids("end", ["flowery"], 10)
        wait_until(lambda: get("/api/tasks").get(result.id, {}).get("state") == "SUCCESS", 10, "the task in Flower",
                   pause=0.2)
        sent = get("/api/task/async-apply/add", json.dumps({"args": [1, 2]}).encode())
        assert crew.app.AsyncResult(sent["task-id"]).get(timeout=10) == 3
        grown = get(f"/api/worker/pool/grow/{NODES[0]}?n=1", b"")
        assert "Growing" in grown["message"]
    finally:
        flower.stop()
    assert "Traceback" not in flower.log.read_text()
