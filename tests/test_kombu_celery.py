"""A Celery worker inside this process, on the memory engine: what Celery itself does with the transport."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Reject
from kombu.asynchronous import set_event_loop

import streambroker.kombu
from streambroker.engine import Engine
from streambroker.testing.servers import wait_until


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("app", broker=f"streambroker-memory://{uuid.uuid4().hex}", backend="cache+memory://")
    app.conf.update(streambroker.kombu.DURABLE)
    app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

    @app.task(shared=False, name="add")
    def add(one: int, two: int) -> int:
        return one + two

    @app.task(shared=False, name="total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(shared=False, name="again", bind=True, max_retries=3)
    def again(self: Any, times: int) -> int:
        if self.request.retries < times:
            raise self.retry(countdown=0.3)
        return int(self.request.retries)

    @app.task(shared=False, name="refuse")
    def refuse() -> None:
        raise Reject("no", requeue=False)

    @app.task(shared=False, name="request", bind=True)
    def request(self: Any) -> dict[str, Any]:
        return {"info": self.request.delivery_info, "tag": self.request.properties["delivery_tag"]}

    # until Kombu 5.6 a closed loop is found by the next worker of the process, whose timers it does not know
    set_event_loop(None)
    yield app
    app.pool.force_close_all()
    app.close()


@pytest.fixture(params=["solo", "threads"])
def worker(app: Celery, request: Any) -> Iterator[Any]:
    # from a test's thread: without remote control of the worker by signals
    with start_worker(app, pool=request.param, concurrency=2, perform_ping_check=False) as worker:
        yield worker


def engine(app: Celery) -> Engine:
    with app.connection_or_acquire() as connection:
        connection.connect()
        found: Engine = connection.transport.shared.engine
        return found


@pytest.mark.usefixtures("worker")
def test_tasks_and_canvas(app: Celery) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    assert add.delay(1, 2).get(timeout=10) == 3
    assert chain(add.s(1, 2), add.s(3))().get(timeout=10) == 6
    assert group(add.s(n, n) for n in range(4))().get(timeout=10) == [0, 2, 4, 6]
    assert chord([add.s(n, n) for n in range(4)], total.s())().get(timeout=10) == 12


@pytest.mark.usefixtures("worker")
def test_countdown_waits_in_the_store_and_retry_too(app: Celery) -> None:
    started = time.monotonic()
    result = app.tasks["add"].apply_async((1, 2), countdown=1)
    assert [late.message.id for late in engine(app).inspector().delayed("celery")] == [result.id]
    assert result.get(timeout=10) == 3
    assert 1 <= time.monotonic() - started < 2.5
    assert app.tasks["again"].delay(2).get(timeout=10) == 2


@pytest.mark.usefixtures("worker")
def test_remote_control(app: Celery) -> None:
    assert [list(reply.values()) for reply in app.control.ping(timeout=1)] == [[{"ok": "pong"}]]
    queues, = app.control.inspect(timeout=1).active_queues().values()
    assert [queue["name"] for queue in queues] == ["celery"]


@pytest.mark.usefixtures("worker")
def test_what_is_rejected_or_unknown_is_a_dead_letter_with_its_reason(app: Celery) -> None:
    app.tasks["refuse"].delay()
    app.send_task("nobody.knows")
    deadline = time.monotonic() + 10
    dead: list[Any] = []
    while len(dead) < 2 and time.monotonic() < deadline:
        dead = list(engine(app).inspector().dead("celery"))
        time.sleep(0.02)
    reasons = {letter.message.headers["type"]: letter.reason for letter in dead}
    assert "refuse" in reasons["refuse"]
    assert reasons["nobody.knows"] == "unknown task 'nobody.knows'"


@pytest.mark.usefixtures("worker")
def test_what_a_worker_would_end_at_is_a_dead_letter(app: Celery) -> None:
    bad: list[tuple[dict[str, Any], Any, str]] = [
        ({"task": []}, [[], {}, {}], "invalid task message: TypeError"),
        ({"task": "add"}, [[], {}, {}], "invalid task message: KeyError"),
        ({"task": "add", "id": "1", "eta": ""}, [[], {}, {}], "invalid task message: AttributeError"),
        ({"task": "add", "id": "1"}, [[1, 2], {}, 7], "undecodable: a task's body is [args, kwargs, embed]"),
        ({"task": "add", "id": "1"}, [[1, 2], []], "undecodable: a task's body is [args, kwargs, embed]"),
        ({"task": "add", "id": "1"}, [[1, 2], {}, {"callbacks": "xyz"}], "undecodable: callbacks of a task are a list"),
        ({"task": "add", "id": "1"}, [[1, 2], {}, {"chord": []}], "undecodable: the chord of a task is"),
        ({"task": "add", "id": "1"}, 5, "undecodable: a task's body is [args, kwargs, embed]"),
        ({"task": "add", "id": "1", "stamped_headers": 5}, [[], {}, {}], "undecodable head: header stamped_headers"),
    ]
    with app.producer_pool.acquire(block=True) as producer:
        for headers, body, _ in bad:
            producer.publish(body, routing_key="celery", headers=headers, serializer="json")
    assert app.tasks["add"].delay(1, 2).get(timeout=10) == 3
    dead = wait_until(lambda: len(found := list(engine(app).inspector().dead("celery"))) == len(bad) and found, 5,
                      "all are dead letters")
    reasons = Counter(reason for _, _, reason in bad)
    assert {reason: sum(letter.reason.startswith(reason) for letter in dead) for reason in reasons} == reasons


@pytest.mark.usefixtures("worker")
def test_a_task_can_see_its_delivery(app: Celery) -> None:
    seen = app.tasks["request"].delay().get(timeout=10)
    assert seen["info"]["redelivered"] is False
    assert seen["info"]["routing_key"] == "celery"
    assert seen["tag"].startswith("celery:")


def test_the_store_is_empty_after_the_worker(app: Celery) -> None:
    with start_worker(app, pool="solo", perform_ping_check=False):
        assert app.tasks["add"].delay(1, 2).get(timeout=10) == 3
        app.control.ping(timeout=0.5)
    store = engine(app)
    assert store.inspector().queues() == ["celery"]
    stats = store.inspector().stats("celery")
    assert (stats.ready, stats.in_flight, stats.delayed, stats.dead) == (0, 0, 0, 0)
    assert list(store.table("bindings").rows()) == ['["celery", "celery", "celery"]']
