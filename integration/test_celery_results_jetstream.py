"""Celery's results on JetStream: everything that a user does with them, and that none is lost."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError, TimeoutError
from celery.result import AsyncResult, GroupResult

from integration.apps.celery_app import make_app
from integration.apps.result_tasks import STORED, WORKED, add_tasks
from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.worker import ROOT, CeleryWorker
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer
from streambroker.testing.servers import RedisServer, wait_until

INCLUDE = ("--include", "integration.apps.result_tasks")


class ResultRig(CeleryRig):
    """Workers that know the tasks about results."""

    def use(self, broker: str | list[str], *, backend: str = "", conf: dict[str, Any] | None = None,
            **options: Any) -> Any:
        conf = {"result_backend_transport_options": {"prefix": self.prefix}, **(conf or {})}
        settings = super().use(broker, backend=backend, conf=conf, **options)
        add_tasks(self.app, settings)
        return settings

    def worker(self, name: str = "", *, start: bool = True, options: tuple[str, ...] = (), **more: Any) -> CeleryWorker:
        return super().worker(name, start=start, options=[*INCLUDE, *options], **more)

    def delay(self, task: str, *args: Any, **options: Any) -> AsyncResult:
        return self.app.tasks[task].apply_async(args, **options)

    def s(self, task: str, *args: Any) -> Any:
        return self.app.tasks[task].s(*args)


@pytest.fixture(scope="module")
def server(nats_servers: Callable[[str], NatsServer]) -> NatsServer:
    return nats_servers("nats")


@pytest.fixture(scope="module")
def crew(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResultRig]:
    """One worker with four processes that all tests share, broker and results on one server."""
    folder = tmp_path_factory.mktemp("results")
    rig = ResultRig(folder, Ledger(folder / "ledger.jsonl"), "results-crew")
    rig.use(server.url(), backend=server.url(), conf={"task_track_started": True, "result_backend_transport_options": {
        "prefix": rig.prefix, "client_name": "asks-for-results"}})
    try:
        rig.worker("crew", concurrency=4)
        yield rig
    finally:
        rig.close()


@pytest.fixture
def rig(tmp_path: Path, ledger: Ledger, prefix: str) -> Iterator[ResultRig]:
    """Workers for one test alone."""
    rig = ResultRig(tmp_path, ledger, prefix)
    yield rig
    rig.close()


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """A server to be killed."""
    with NatsServer() as server:
        yield server


def asker(server: NatsServer) -> dict[str, Any]:
    """Of the connections for results the one with most subscriptions: the test's own, when it waits."""
    found = [client for client in server.look("connz?limit=10000")["connections"]
             if client.get("name") == "asks-for-results"]
    return max(found, key=lambda client: client["subscriptions"])


def subjects(server: NatsServer, rig: CeleryRig) -> dict[str, int]:
    stream = server.api(f"STREAM.INFO.{rig.prefix}_results", {"subjects_filter": ">"})
    found: dict[str, int] = stream["state"].get("subjects") or {}
    return found


# --- what a user does


def test_the_entry_point_finds_the_backend(crew: ResultRig, server: NatsServer) -> None:
    backend = crew.app.backend
    assert type(backend).__module__ == "streambroker.celery_results.backend"
    assert backend.as_uri() == f"jetstream://127.0.0.1:{server.port}"
    assert backend.as_uri(include_password=True) == server.url()


@pytest.mark.parametrize("value", [None, 0, "", "ü", [1, {"a": None}], {"x": 1.5}])
def test_values_come_back_as_they_are(crew: ResultRig, value: Any) -> None:
    assert crew.delay("echo", value).get(timeout=20) == value


def test_a_waiter_comes_early_late_or_in_vain(crew: ResultRig) -> None:
    result = crew.delay("echo", "slow", 1.0)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        result.get(timeout=0.3)
    assert 0.25 < time.monotonic() - began < 0.9
    with pytest.raises(TimeoutError):
        result.get(timeout=0)
    assert result.get(timeout=20) == "slow"
    assert crew.app.AsyncResult(result.id).get(timeout=0) == "slow"
    assert crew.app.AsyncResult(result.id).get() == "slow"
    assert crew.app.AsyncResult("unknown").state == "PENDING"
    with pytest.raises(TimeoutError):
        crew.app.AsyncResult("unknown").get(timeout=0.1)


def test_states_are_seen_as_they_change(crew: ResultRig) -> None:
    result = crew.delay("steps", "go")
    wait_until(lambda: result.state == "PROGRESS", 20, "it is in the middle")
    assert result.info == {"half": True}
    seen: list[str] = []

    def on_message(meta: dict[str, Any]) -> None:
        seen.append(meta["status"])
        crew.flag("go")

    assert result.get(timeout=20, on_message=on_message) == "done"
    assert seen == ["PROGRESS", "SUCCESS"]
    held = crew.delay("hold", "held", "let-go")
    wait_until(lambda: held.state == "STARTED", 20, "it is running")
    crew.flag("let-go")
    held.get(timeout=20)


def test_failures_come_back(crew: ResultRig) -> None:
    result = crew.delay("wrong", "so it is")
    with pytest.raises(LookupError, match="so it is"):
        result.get(timeout=20)
    assert result.state == "FAILURE"
    assert "LookupError" in result.traceback
    assert isinstance(crew.app.AsyncResult(result.id).get(timeout=5, propagate=False), LookupError)


def test_nothing_is_polled_while_waiting(crew: ResultRig, server: NatsServer) -> None:
    crew.flag("never-mind")
    crew.delay("echo", 1).get(timeout=20)
    results = [crew.delay("hold", f"held{number}", "released") for number in range(3)]
    got: list[Any] = []
    waiting = [threading.Thread(target=lambda result=result: got.append(result.get(timeout=60))) for result in results]
    for thread in waiting:
        thread.start()
    wait_until(lambda: crew.app.backend.store._watcher._keys, 10, "they wait")
    time.sleep(0.5)
    before = asker(server)
    time.sleep(3)
    after = asker(server)
    assert before["cid"] == after["cid"]
    assert after["in_msgs"] - before["in_msgs"] == 0
    crew.flag("released")
    for thread in waiting:
        thread.join(60)
    assert got == [None] * 3


def test_a_waiter_leaves_nothing_behind(crew: ResultRig, server: NatsServer) -> None:
    for _ in range(5):
        with pytest.raises(TimeoutError):
            crew.app.AsyncResult("unknown").get(timeout=0.05)
        with pytest.raises(TimeoutError):
            group(crew.s("echo", number, 1.0) for number in range(3)).delay().get(timeout=0.05)
    # one is for answers
    wait_until(lambda: asker(server)["subscriptions"] == 1, 10, "all is unsubscribed")
    pending = crew.app.backend._pending_results
    wait_until(lambda: not any(len(waiters) for table in pending for waiters in list(table.values())), 10,
               "Celery's tables forget who waits no more")
    assert len(crew.app.backend._pending_messages) == 0


def test_many_threads_wait_side_by_side(crew: ResultRig) -> None:
    """As in a web server; two of them for each task, with objects of their own."""
    got: list[tuple[int, int]] = []

    def serve(number: int) -> None:
        result = crew.delay("echo", number, 0.05)
        again = crew.app.AsyncResult(result.id)
        other = threading.Thread(target=lambda: got.append((number, again.get(timeout=60))))
        other.start()
        got.append((number, result.get(timeout=60)))
        other.join(60)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == sorted([(number, number) for number in range(40)] * 2)


@pytest.mark.parametrize("world", ["gevent", "eventlet"])
def test_greenlets_wait_side_by_side(crew: ResultRig, world: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "integration.apps.green_waiters", world, "100"], cwd=ROOT, timeout=100,
        env={**crew.settings.environment(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    assert told["got"] == list(range(100))
    assert told["then"] == ["then"]
    assert told["late"] == ["late"]
    assert told["worst"] < 1.0
    if world == "gevent":
        assert told["files"] < 60


def test_groups(crew: ResultRig) -> None:
    result = group(crew.s("echo", number) for number in range(30)).delay()
    assert result.get(timeout=30) == list(range(30))
    assert result.completed_count() == 30
    result.save()
    restored = GroupResult.restore(result.id, app=crew.app)
    assert restored.get(timeout=5) == list(range(30))
    assert [value for _, value in sorted(
        (meta["task_id"], meta["result"]) for _, meta in restored.iter_native(timeout=5))] == [
        value for _, value in sorted((each.id, each.result) for each in restored.results)]
    restored.delete()
    assert GroupResult.restore(result.id, app=crew.app) is None
    mixed = group([crew.s("echo", 1), crew.s("wrong", "one of them")]).delay()
    with pytest.raises(LookupError, match="one of them"):
        mixed.get(timeout=20)
    assert [str(value) for value in mixed.get(timeout=20, propagate=False)] == ["1", "one of them"]
    empty: list[Any] = group([]).delay().get(timeout=5)
    assert empty == []


def test_a_group_is_waited_for_in_parts(crew: ResultRig) -> None:
    result = group([crew.s("echo", "soon"), crew.s("echo", "later", 1.5)]).delay()
    with pytest.raises(TimeoutError):
        result.get(timeout=0.5)
    order = [meta["result"] for _, meta in result.iter_native(timeout=20)]
    assert order == ["soon", "later"]


def test_chains_and_chords(crew: ResultRig) -> None:
    assert chain(crew.s("add", 1, 2), crew.s("add", 3), crew.s("add", 4)).delay().get(timeout=20) == 10
    assert chord([crew.s("echo", number) for number in range(20)], crew.s("collect")).delay().get(timeout=20) == list(
        range(20))
    assert chord((crew.s("echo", number) for number in range(5)), crew.s("collect")).delay().get(
        timeout=20) == list(range(5))
    assert (group(crew.s("echo", 1), crew.s("echo", 2)) | crew.s("collect") | crew.s("collect")).delay().get(
        timeout=20) == [1, 2]
    assert chord([], crew.s("collect")).delay().get(timeout=20) == []


def test_nested_chords(crew: ResultRig) -> None:
    inner = chord([crew.s("echo", 1), crew.s("echo", 2)], crew.s("collect"))
    assert chord([inner, crew.s("echo", 3)], crew.s("collect")).delay().get(timeout=20) == [[1, 2], 3]
    deeper = chord([chord([inner.clone(), crew.s("echo", 4)], crew.s("collect")), crew.s("echo", 5)],
                   crew.s("collect"))
    assert deeper.delay().get(timeout=20) == [[[1, 2], 4], 5]
    one, six = chord([crew.s("replaced"), crew.s("echo", 6)], crew.s("collect")).delay().get(timeout=20)
    # Celery 5.3 gives both parts of a chord that replaces a task the index of that task
    assert (sorted(one), six) == ([1, 2], 6)
    crew.delay("nesting", "of groups")
    crew.ledger.wait_ids("end", ["of groups"], 20)


def test_a_chord_that_grows(crew: ResultRig) -> None:
    result = chord([crew.s("growing", 2), crew.s("echo", 7)], crew.s("collect")).delay()
    assert sorted(result.get(timeout=20)) == [2, 7, 100, 101]


def test_chords_that_fail(crew: ResultRig) -> None:
    result = chord([crew.s("echo", 1), crew.s("wrong", "a part")], crew.s("collect", "failed body")).delay()
    with pytest.raises(ChordError, match="a part"):
        result.get(timeout=20, follow_parents=False)
    outer = chord([chord([crew.s("wrong", "deep down")], crew.s("collect")), crew.s("echo", 1)],
                  crew.s("collect", "failed body")).delay()
    with pytest.raises(ChordError, match="deep down"):
        outer.get(timeout=20, follow_parents=False)
    assert "failed body" not in crew.ledger.ids("end")


def test_the_body_of_each_chord_runs_once(crew: ResultRig, server: NatsServer) -> None:
    """Forty chords at once on four processes, so that their last parts end together."""
    names = [f"body{number}" for number in range(40)]
    results = [chord([crew.s("echo", part) for part in range(6)], crew.s("collect", name)).delay() for name in names]
    assert [result.get(timeout=60) for result in results] == [list(range(6))] * 40
    assert sorted(line.id for line in crew.ledger.lines("end") if line.id in names) == sorted(names)
    wait_until(lambda: not [subject for subject in subjects(server, crew) if f"{crew.prefix}.c." in subject], 10,
               "the parts of all chords are gone")


def test_forgetting_and_ignoring(crew: ResultRig, server: NatsServer) -> None:
    result = crew.delay("echo", 1)
    result.get(timeout=20)
    there = subjects(server, crew)
    result.forget()
    assert len(subjects(server, crew)) == len(there) - 1
    assert crew.app.AsyncResult(result.id).state == "PENDING"
    there = subjects(server, crew)
    ignored = crew.delay("silent", "said nothing")
    crew.ledger.wait_ids("end", ["said nothing"], 20)
    crew.delay("echo", 2).forget()
    assert ignored.get(timeout=0.1) is None
    assert ignored.id not in str(subjects(server, crew))


def test_revoked_and_eager_tasks(crew: ResultRig) -> None:
    result = crew.delay("hold", "revoked", "never raised")
    crew.ledger.wait_ids("start", ["revoked"], 20)
    crew.app.control.revoke(result.id, terminate=True)
    eager = crew.app.tasks["echo"].apply((5,))
    assert eager.get() == 5
    assert crew.app.AsyncResult(eager.id).state == "PENDING"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)


def test_the_backend_goes_into_other_processes(crew: ResultRig) -> None:
    crew.app.set_current()
    result = crew.delay("echo", 1)
    copy = pickle.loads(pickle.dumps(crew.app.backend))
    assert copy.as_uri() == crew.app.backend.as_uri()
    assert result.get(timeout=20) == 1


# --- settings


@pytest.mark.parametrize("version", ["nats210", "nats"])
def test_results_expire(nats_servers: Callable[[str], NatsServer], rig: ResultRig, version: str) -> None:
    """With all that belongs to them; the server is back at its base."""
    server = nats_servers(version)
    rig.use(server.url(), backend=server.url(), conf={"result_expires": 2})
    rig.worker()
    result = rig.delay("echo", 1)
    assert result.get(timeout=20) == 1
    assert chord([rig.s("echo", 1), rig.s("echo", 2)], rig.s("collect")).delay().get(timeout=20) == [1, 2]
    with pytest.raises(ChordError):
        chord([rig.s("echo", 1), rig.s("wrong", "")], rig.s("collect")).delay().get(timeout=20, follow_parents=False)
    wait_until(lambda: rig.app.AsyncResult(result.id).state == "PENDING", 10, "it has expired")
    wait_until(lambda: not subjects(server, rig), 10, "nothing is left")
    held = server.base(f"*/{rig.prefix}_results*").held
    assert list(held.values()) == ["0 messages"]


def test_extended_compressed_pickled(server: NatsServer, rig: ResultRig) -> None:
    rig.use(server.url(), backend=server.url(), conf={
        "result_extended": True, "result_compression": "gzip", "result_serializer": "pickle",
        "result_accept_content": ["pickle"]})
    rig.worker()
    result = rig.delay("echo", "x" * 10_000)
    assert result.get(timeout=20) == "x" * 10_000
    assert result.name == "echo"
    assert tuple(result.args) == ("x" * 10_000,)
    assert result.queue == "celery"
    assert result.worker
    with pytest.raises(LookupError):
        rig.delay("wrong", "").get(timeout=20)


def test_a_result_over_the_servers_limit_is_a_failure_that_says_so(own: NatsServer, rig: ResultRig) -> None:
    rig.use(own.url(), backend=own.url())
    rig.worker()
    result = rig.delay("inflate", 900_000)
    assert len(result.get(timeout=20)) == 900_000
    result = rig.delay("inflate", 2_000_000)
    with pytest.raises(Exception, match=r"too large.*20\d\d\d\d\d bytes.*1048576"):
        result.get(timeout=20)
    assert result.state == "FAILURE"


# --- never lost


@pytest.mark.parametrize("pool", ["prefork", "solo"])
@pytest.mark.parametrize("broker", ["jetstream", "redis-streams"])
def test_a_worker_killed_between_its_work_and_its_result(server: NatsServer, valkey: RedisServer, rig: ResultRig,
                                                         broker: str, pool: str) -> None:
    rig.use(server.url() if broker == "jetstream" else valkey.url(), backend=server.url(), visibility_timeout=5)
    rig.worker("first", pool=pool)
    result = rig.delay("fatal", "job", WORKED)
    rig.ledger.wait_ids("dying", ["job"], 20)
    assert result.state == "PENDING"
    if pool == "solo":
        wait_until(lambda: not rig.workers[0].alive, 10, "it is dead")
        rig.worker("second", pool=pool)
    assert result.get(timeout=40) == {"name": "job", "answer": 42}
    assert len(rig.ledger.starts("job")) == 2


@pytest.mark.parametrize("pool", ["prefork", "solo"])
@pytest.mark.parametrize("broker", ["jetstream", "redis-streams"])
def test_a_worker_killed_between_its_result_and_its_ack(server: NatsServer, valkey: RedisServer, rig: ResultRig,
                                                        broker: str, pool: str) -> None:
    """The result was stored before: it is there while the job is not acknowledged, and the repeat does not touch it."""
    rig.use(server.url() if broker == "jetstream" else valkey.url(), backend=server.url(), visibility_timeout=5)
    rig.worker("first", pool=pool)
    result = rig.delay("fatal", "job", STORED)
    rig.ledger.wait_ids("dying", ["job"], 20)
    assert rig.app.AsyncResult(result.id).get(timeout=1) == {"name": "job", "answer": 42}
    key = rig.app.backend.get_key_for_task(result.id)
    first = rig.app.backend.store.get(key)
    if pool == "solo":
        wait_until(lambda: not rig.workers[0].alive, 10, "it is dead")
        assert rig.stats().in_flight + rig.stats().ready == 1
        rig.worker("second", pool=pool)
    rig.wait_stats(timeout=30, in_flight=0, ready=0)
    assert rig.app.backend.store.get(key) == first
    assert result.get(timeout=5) == {"name": "job", "answer": 42}


@pytest.mark.parametrize("broker", ["jetstream", "redis-streams"])
def test_a_worker_killed_while_it_stores_its_result(server: NatsServer, valkey: RedisServer, rig: ResultRig,
                                                    broker: str) -> None:
    """What it sent hangs on the way, and arrives when another worker has the job."""
    with Proxy(server.port) as proxy:
        rig.use(server.url() if broker == "jetstream" else valkey.url(), backend=server.url(port=proxy.port),
                visibility_timeout=5)
        rig.worker("first", pool="solo")
        assert rig.delay("echo", 1).get(timeout=20) == 1
        proxy.hold("up")
        result = rig.delay("fatal", "job", "")
        rig.ledger.wait_ids("end", ["job"], 20)
        rig.workers[0].kill()
        proxy.release()
        rig.worker("second", pool="solo")
        assert result.get(timeout=40) == {"name": "job", "answer": 42}
        rig.wait_stats(timeout=30, in_flight=0, ready=0)


def test_a_worker_killed_after_its_ack(server: NatsServer, rig: ResultRig) -> None:
    rig.use(server.url(), backend=server.url(), visibility_timeout=5)
    rig.worker("first")
    result = rig.delay("fatal", "job", "")
    assert result.get(timeout=20) == {"name": "job", "answer": 42}
    rig.wait_stats(in_flight=0, ready=0)
    rig.workers[0].kill()
    rig.worker("second")
    assert rig.delay("echo", 1).get(timeout=20) == 1
    assert rig.app.AsyncResult(result.id).get(timeout=1) == {"name": "job", "answer": 42}
    assert len(rig.ledger.starts("job")) == 1


def test_workers_killed_in_the_middle_of_chords(server: NatsServer, rig: ResultRig) -> None:
    rig.use(server.url(), backend=server.url(), visibility_timeout=5)
    rig.start(rig.worker("one", start=False), rig.worker("two", start=False))
    results = [chord([rig.s("echo", part, 0.05) for part in range(10)], rig.s("collect", f"body{number}")).delay()
               for number in range(10)]
    rig.ledger.wait("end", 2, 40)
    rig.workers[0].kill()
    rig.worker("three")
    assert [result.get(timeout=60) for result in results] == [list(range(10))] * 10


def test_results_wait_for_their_store(own: NatsServer, valkey: RedisServer, rig: ResultRig) -> None:
    """It is down when the task ends: the worker keeps the job and tries again, the waiter waits on."""
    rig.use(valkey.url(), backend=own.url())
    worker = rig.worker()
    assert rig.delay("echo", 0).get(timeout=20) == 0
    result = rig.delay("echo", 1, 1.0)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(result.get(timeout=60)))
    waiting.start()
    own.kill()
    worker.wait_log("result store is away")
    assert rig.stats().in_flight == 1
    own.start()
    waiting.join(60)
    assert got == [1]
    rig.wait_stats(in_flight=0, ready=0)


def test_a_waiter_outlasts_restarts_of_its_server(own: NatsServer, rig: ResultRig) -> None:
    rig.use(own.url(), backend=own.url())
    rig.worker()
    assert rig.delay("echo", 0).get(timeout=20) == 0
    result = rig.delay("hold", "held")
    rig.ledger.wait_ids("start", ["held"], 20)
    with pytest.raises(TimeoutError):
        result.get(timeout=0.1)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(result.get(timeout=60)))
    waiting.start()
    own.restart(hard=True)
    own.restart()
    rig.flag("release")
    waiting.join(60)
    assert got == [None]


def test_a_time_out_while_the_store_is_away_is_a_time_out(own: NatsServer, rig: ResultRig) -> None:
    rig.use(own.url(), backend=own.url())
    app = make_app(rig.settings)
    own.kill()
    for timeout in (0.2, 1.0):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            app.AsyncResult("unknown").get(timeout=timeout)
        assert time.monotonic() - began < timeout + 1.5
    with pytest.raises(ConnectionError):
        _ = app.AsyncResult("unknown").state
    own.start()
    assert app.AsyncResult("unknown").state == "PENDING"
