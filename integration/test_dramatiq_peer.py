"""Row 134: what dramatiq-redis-streams promises its users, where no other test of the broker shows it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.errors import QueueJoinTimeout

from integration.dramatiq_worker import dramatiq_place
from integration.stores import Server
from streambroker.cli import main
from streambroker.dramatiq import RedisStreamsBroker, StreamBroker
from streambroker.testing.servers import RedisServer
from tests.dramatiq_rig import Brokers, message, take, until, working

pytestmark = pytest.mark.stores


@pytest.fixture
def brokers(server: Server, prefix: str) -> Iterator[Brokers]:
    made = Brokers(*dramatiq_place(server), prefix=prefix)
    yield made
    made.close()


@pytest.fixture
def broker(brokers: Brokers) -> StreamBroker:
    made = brokers()
    made.declare_queue("default")
    return made


def counts(broker: StreamBroker) -> tuple[int, int, int]:
    return broker.get_queue_message_counts("default")


def test_a_process_takes_its_prefetch_and_leaves_the_rest_to_others(broker: StreamBroker, brokers: Brokers) -> None:
    for number in range(7):
        broker.enqueue(message(number))
    consumer = broker.consume("default", prefetch=2, timeout=100)
    first, second = take(consumer, 2)
    assert next(consumer) is None
    other = brokers().consume("default", prefetch=10, timeout=100)
    rest = take(other, 5)
    assert [each.args[0] for each in [first, second, *rest]] == list(range(7))
    other.requeue(rest)
    other.close()
    # each way to settle makes room for one
    consumer.nack(first)
    third, = take(consumer, 1)
    assert next(consumer) is None
    consumer.ack(second)
    fourth, = take(consumer, 1)
    assert next(consumer) is None
    consumer.requeue([fourth])
    assert len(take(consumer, 1)) == 1
    assert next(consumer) is None
    assert [third.args[0], fourth.args[0]] == [2, 3]


def test_a_prefetch_of_nothing_is_one(broker: StreamBroker) -> None:
    for number in range(2):
        broker.enqueue(message(number))
    consumer = broker.consume("default", prefetch=0, timeout=100)
    got, = take(consumer, 1)
    assert next(consumer) is None
    consumer.ack(got)
    assert len(take(consumer, 1)) == 1


def test_what_a_closed_consumer_had_not_given_out_is_the_next_ones(broker: StreamBroker, brokers: Brokers) -> None:
    """Of the same process or of another, with no lease to wait for."""
    for number in range(4):
        broker.enqueue(message(number))
    consumer = broker.consume("default", prefetch=4, timeout=100)
    running, = take(consumer, 1)
    consumer.close()
    own = broker.consume("default", prefetch=2, timeout=100)
    assert [each.args[0] for each in take(own, 1)] == [1]
    own.close()
    others = take(brokers().consume("default", prefetch=4, timeout=100), 2)
    assert [(each.args[0], each.delivery_count) for each in others] == [(2, 1), (3, 1)]
    assert (running.delivery.lost, running.delivery.taken) == (False, False)


def test_join_does_not_wait_for_nothing(broker: StreamBroker) -> None:
    start = time.monotonic()
    broker.join("default")
    broker.enqueue(message(1))
    with pytest.raises(QueueJoinTimeout):
        broker.join("default", timeout=0)
    assert time.monotonic() - start < 2


def test_a_flush_leaves_what_runs_and_who_consumes(broker: StreamBroker) -> None:
    started, release, ran = threading.Event(), threading.Event(), []

    @dramatiq.actor(broker=broker)
    def work(number: int) -> None:
        started.set()
        assert release.wait(10)
        ran.append(number)

    work.send(1)
    # one is prefetched for the one thread, as Dramatiq has it
    with working(broker, threads=1):
        assert started.wait(5)
        work.send_with_options(args=(2,), delay=60_000)
        broker.flush("default")
        assert counts(broker) == (0, 0, 0)
        release.set()
        work.send(3)
        until(lambda: ran == [1, 3])
        broker.join("default", timeout=5000)


def test_dead_messages_live_for_their_ttl(brokers: Brokers) -> None:
    """Though nothing else dies after them."""
    broker = brokers(dead_message_ttl=1000)
    consumer = broker.consume("default", timeout=100)
    broker.enqueue(message(1))
    consumer.nack(*take(consumer, 1))
    until(lambda: counts(broker) == (0, 0, 1))
    until(lambda: counts(broker) == (0, 0, 0), 5)


def test_an_operator_sees_and_requeues(broker: StreamBroker, server: Server, prefix: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    def told(*argv: str) -> Any:
        assert main([*argv, "--json", "--url", dramatiq_place(server)[1], "--prefix", prefix]) == 0
        return json.loads(capsys.readouterr().out)

    before = time.time()
    for number in range(6):
        broker.enqueue(message(number, actor="charge"))
    later = broker.enqueue(message(9, actor="remind"), delay=60_000)
    consumer = broker.consume("default", prefetch=5, timeout=100)
    held = take(consumer, 5)
    for each in held[:3]:
        consumer.nack(each)
    until(lambda: counts(broker)[2] == 3)

    [queue] = told("queues", "--deliveries")
    assert [queue[name] for name in ("ready", "delayed", "in_flight", "dead")] == [1, 1, 2, 3]
    [worker] = told("workers")
    assert (worker["queues"], {each["holder"] for each in queue["deliveries"]}) == (["default"], {worker["holder"]})
    [waiting] = told("delayed", "ls")
    assert (waiting["type"], waiting["message_id"]) == ("remind", later.message_id)
    assert 59 < waiting["due"] - before < 75
    assert [each["message_id"] for each in told("dead", "ls")] == [each.message_id for each in held[:3]]

    assert told("dead", "replay", "-Q", "default", "--yes")["replayed"] == 3
    # as they died, and behind what was there
    consumer.requeue(held[3:])
    assert [each.args[0] for each in take(consumer, 5)] == [3, 4, 5, 0, 1]


@pytest.mark.only_on("redis", "a client of redis-py")
def test_a_client_of_the_users_own_says_where_the_store_is(server: RedisServer, prefix: str) -> None:
    own = redis.Redis(port=server.port)
    broker, ran = RedisStreamsBroker(client=own, namespace=prefix, middleware=[]), []

    @dramatiq.actor(broker=broker)
    def work(number: int) -> None:
        ran.append(number)

    for number in range(30):
        work.send(number)
    with working(broker, threads=2):
        until(lambda: len(ran) == 30)
        broker.join("default", timeout=5000)
    broker.close()
    broker.close()
    assert sorted(ran) == list(range(30))
    assert own.ping()
    own.close()
