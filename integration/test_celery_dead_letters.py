"""What cannot be done is parked with a reason: poison that kills its workers, rejects, unknown and broken messages."""

from __future__ import annotations

import json
import signal
import time

import pytest
from kombu import Exchange, Queue

from integration.ledger import Ledger
from integration.rig import CeleryRig
from integration.stores import Server, put_foreign
from streambroker.message import DeadLetter
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

QUICK = ["--without-mingle"]
NEIGHBOURS = 30


def deliveries(ledger: Ledger, name: str) -> list[tuple[int, bool]]:
    """Of each start: which delivery it was told it is, and whether that is a repeated one."""
    return [(line.facts["headers"].get("x-delivery-count", 1), line.facts["redelivered"])
            for line in ledger.starts(name)]


# ---------------------------------------------------------------- poison

@pytest.mark.parametrize(("pool", "limit"), [pytest.param("threads", 5, marks=pytest.mark.long), ("solo", 3)])
@pytest.mark.usefixtures("at_base")
def test_poison_ends_at_the_limit_and_spares_its_neighbours(server: Server, celery: CeleryRig, ledger: Ledger,
                                                            pool: str, limit: int) -> None:
    """Rows 94, 99: a task that kills its worker each time, with others that were fetched with it: it starts as often as
    the limit allows, then it is a dead letter; every neighbour runs; the last worker lives. Then it can be replayed."""
    celery.use(server.url(), visibility_timeout=2, conf={"worker_prefetch_multiplier": 100},
               **({} if limit == 5 else {"delivery_limit": limit}))
    celery.send("poison", "poison")
    neighbours = celery.send_all("work", [f"neighbour-{number}" for number in range(NEIGHBOURS)])
    workers = [celery.worker(f"w{number}", start=False, pool=pool, concurrency=1, options=QUICK)
               for number in range(limit + 1)]
    celery.start(workers[0])
    for worker in workers[1:]:
        worker.start(wait=False)
    celery.wait_stats(dead=1, timeout=60)
    assert deliveries(ledger, "poison") == [(count, count > 1) for count in range(1, limit + 1)]
    ledger.wait_ids("end", neighbours, 20)
    wait_until(lambda: sum(worker.alive for worker in workers) == 1, 5, "one worker is left")
    [dead] = celery.cli("dead", "ls")
    assert (dead["type"], dead["delivery_count"]) == ("poison", limit)
    assert dead["reason"].startswith(f"delivery limit of {limit} reached")
    pid = ledger.starts("poison")[-1].pid
    assert f"-{pid}-" in dead["holder"]

    celery.flag("fixed")
    celery.cli("dead", "replay", "-Q", "celery", "--yes")
    ledger.wait_ids("end", ["poison"], 10)
    assert deliveries(ledger, "poison")[-1] == (1, False)
    assert ledger.verdict().clean
    celery.wait_stats(ready=0, in_flight=0, dead=0)
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_a_lost_pool_process_counts(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 32, 92, 93, 94: the worker lives when the pool process of a task is killed; the job is back as soon as
    Celery sees that, each attempt knows its number; at the limit it is a dead letter and the queue goes on."""
    celery.use(server.url(), delivery_limit=3)
    worker = celery.worker(concurrency=2, options=QUICK)
    celery.send("poison", "poison")
    celery.send("hold", "hold")
    ledger.wait_ids("start", ["hold"], 10)
    celery.wait_stats(dead=1, timeout=30)
    assert deliveries(ledger, "poison") == [(1, False), (2, True), (3, True)]
    [dead] = celery.cli("dead", "ls")
    assert (dead["delivery_count"], dead["reason"].startswith("delivery limit of 3 reached")) == (3, True)

    child = ledger.starts("hold")[-1].pid
    worker.signal_child(child, signal.SIGTERM)
    worker.wait_log(r"signal 15 \(SIGTERM\) Job", timeout=10)  # Celery looks every 5 s
    seen = time.time()
    wait_until(lambda: len(ledger.starts("hold")) == 2, 5, "it starts again")
    assert ledger.starts("hold")[-1].at - seen < 2
    celery.flag("release")
    ledger.wait_ids("end", ["hold"], 5)
    celery.send("work", "after")
    ledger.wait_ids("end", ["after"], 5)
    assert worker.alive
    celery.cli("dead", "purge", "-Q", "celery", "--yes")
    celery.finish()


# ---------------------------------------------------------------- rejects, failures, broken messages

@pytest.mark.usefixtures("at_base")
def test_what_nobody_can_do_becomes_a_dead_letter(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """Rows 39, 95, 96: a reject, a failure where failures are not acknowledged, an unknown task, an undecodable body, a
    foreign entry, and endless requeueing: each with its reason and the original; a replay runs it again."""
    celery.use(server.url(), delivery_limit=4, conf={"task_acks_on_failure_or_timeout": False})
    worker = celery.worker(pool="threads", concurrency=2, options=QUICK)
    celery.send("rejecting", "rejecting")
    celery.send("failing", "failing")
    celery.send("rejecting", "requeueing", True)
    unknown = celery.app.send_task("nowhere", ("argument",))
    with celery.app.producer_pool.acquire(block=True) as producer:
        producer.publish(b"\xff{", routing_key="celery", content_type="application/json", content_encoding="utf-8",
                         headers={"task": "work", "id": "undecodable"}, retry=True)
    put_foreign(server, celery.prefix)
    celery.wait_stats(dead=6, ready=0, in_flight=0, timeout=20)
    celery.send("work", "after")
    ledger.wait_ids("end", ["after"], 5)
    assert worker.alive

    letters: dict[str, DeadLetter] = {}
    for letter in celery.engine.inspector().dead("celery"):
        is_task = letter.message.body.startswith(b"[[")
        letters[json.loads(letter.message.body)[0][0] if is_task else letter.message.id or "foreign"] = letter
    assert {name: letter.reason.partition(":")[0] for name, letter in letters.items()} == {
        "rejecting": "rejected without requeue", "failing": "rejected without requeue",
        "requeueing": "delivery limit of 4 reached", "argument": "unknown task 'nowhere'",
        "undecodable": "undecodable", "foreign": "not a message"}
    assert deliveries(ledger, "requeueing") == [(1, False), (2, True), (3, True), (4, True)]
    assert [letters[name].count for name in ("rejecting", "requeueing", "failing")] == [1, 4, 1]
    assert letters["argument"].message.headers["headers"]["id"] == unknown.id
    assert letters["undecodable"].message.body == b"\xff{"
    assert letters["foreign"].fields["data"] == b"of another program"

    celery.flag("fixed")
    celery.cli("dead", "replay", "-Q", "celery", letters["failing"].id, "--yes")
    ledger.wait_ids("end", ["failing"], 5)
    assert deliveries(ledger, "failing") == [(1, False), (1, False)]
    celery.wait_stats(dead=5)
    celery.cli("dead", "purge", "-Q", "celery", "--yes")
    celery.finish()


@pytest.mark.usefixtures("at_base")
def test_a_queues_dead_letter_exchange_gets_them(server: Server, celery: CeleryRig, ledger: Ledger) -> None:
    """`x-dead-letter-exchange`, `x-dead-letter-routing-key` and `x-delivery-limit`, as RabbitMQ has them: rejected
    messages and those beyond the limit go to the queues bound there, the original whole, with why and from where."""
    celery.use(server.url(), queues=["jobs"], arguments={"jobs": {
        "x-dead-letter-exchange": "graves", "x-dead-letter-routing-key": "rest", "x-delivery-limit": 2}})
    graveyard = Queue("graveyard", Exchange("graves", "direct"), routing_key="rest")
    with celery.app.connection_for_write() as connection:
        graveyard(connection.default_channel).declare()
    celery.worker(pool="threads", concurrency=1, options=QUICK)
    celery.send("rejecting", "rejected")
    celery.send("rejecting", "requeued", True)
    celery.wait_stats("graveyard", ready=2, timeout=20)
    celery.wait_stats("jobs", ready=0, in_flight=0, dead=0)
    assert deliveries(ledger, "requeued") == [(1, False), (2, True)]

    deaths = {}
    with celery.app.connection_for_read() as connection:
        bound = graveyard(connection.default_channel)
        for _ in range(2):
            message = bound.get()
            [death] = message.headers["x-death"]
            deaths[message.decode()[0][0]] = death["reason"], death["queue"], death["count"]
            message.ack()
    assert deaths == {"rejected": ("rejected", "jobs", 1), "requeued": ("delivery_limit", "jobs", 2)}
    celery.wait_stats("graveyard", ready=0, in_flight=0)
    celery.finish()
