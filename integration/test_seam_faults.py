"""What an engine promises, while a fault happens, on both stores. What is about one store is in the breakers' tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from integration.load import Load
from integration.stores import Server, can_be_full, full, lose_everything, mark
from streambroker import connect
from streambroker.engine import Consumer, Engine
from streambroker.errors import StoreConnectionError
from streambroker.testing.conformance.kit import MARGIN, bodies, drain, messages
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.faults import Proxy
from streambroker.testing.servers import wait_until

pytestmark = pytest.mark.stores

LEASE = 1.0
#: promise 8
BACK = 10.0

Make = Callable[..., Engine]


@pytest.fixture
def make(prefix: str) -> Iterator[Make]:
    """`make(server, port)` makes an engine; a port is that of a proxy."""
    made: list[Engine] = []

    def make(server: Server, port: int = 0, **options: object) -> Engine:
        made.append(connect(server.url(port=port), **{"prefix": prefix, "visibility_timeout": LEASE, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_a_publish_whose_reply_is_lost_is_there_once(server: Server, proxy: Proxy, make: Make, prefix: str) -> None:
    """Promise 1: alone, in a batch, and with a delay."""
    engine, other = make(server, proxy.port), make(server)
    engine.publish("q", messages("first"))
    engine.publish("q", messages("first of those that wait", delay=60))
    for number, batch in enumerate((messages("a"), messages(*"bcd"), messages("later", delay=60)), 1):
        proxy.drop_reply(mark(server, prefix, "q", delayed=bool(batch[0].delay)))
        engine.publish("q", batch)
        proxy.wait_dropped(number)
    stats = other.inspector().stats("q")
    assert (stats.ready, stats.delayed) == (5, 2)
    assert bodies(drain(other.consume(["q"]), 6, 1.0)) == ["first", *"abcd"]


def test_a_holder_keeps_what_it_has(fresh: Callable[..., Server], make: Make) -> None:
    """Promise 2: over links that end and a store that is away, while somebody else waits for it."""
    server = fresh(fsync="always")
    with Proxy(server.port) as proxy:
        holder, other = make(server, proxy.port), make(server)
        holder.publish("q", messages(*"abc"))
        holding = holder.consume(["q"])
        held = drain(holding, 3)
        waiting = other.consume(["q"])
        assert waiting.receive(0.2) == []
        assert proxy.reset()
        assert waiting.receive(2 * LEASE) == []
        server.kill()
        time.sleep(2 * LEASE)
        server.start()
        assert waiting.receive(2 * LEASE) == []
        assert not any(delivery.lost for delivery in held)
        for delivery in held:
            holding.ack(delivery)
        wait_until(lambda: holding.receive(0.1) == [] and other.inspector().stats("q").in_flight == 0, 5, "settled")
        assert other.inspector().stats("q").ready == 0
        holder.close()


def test_what_waits_for_its_time_outlives_its_store(fresh: Callable[..., Server], make: Make) -> None:
    """Promise 5: killed before the one is due, and back after the other was."""
    server = fresh(fsync="always")
    engine = make(server)
    began = time.time()
    engine.publish("q", [*messages("early", delay=1.0), *messages("late", delay=3.5)])
    consumer = engine.consume(["q"])
    server.kill()
    time.sleep(max(0.0, began + 1.5 - time.time()))
    server.start()
    assert bodies(drain(consumer, 1, BACK)) == ["early"]
    assert bodies(drain(consumer, 1, BACK)) == ["late"]
    assert time.time() >= began + 3.5
    assert consumer.receive(0.3) == []


def test_producing_and_consuming_go_on_after_each_fault(fresh: Callable[..., Server], kind: str, prefix: str) -> None:
    """Promise 8: soon after the store is back, and told meanwhile; what was confirmed comes."""
    server = fresh(fsync="always", **can_be_full(kind))
    options = {"visibility_timeout": 4.0, "socket_timeout": 2.0, "block_timeout": 2.0, "publish_timeout": 1.0}
    with Proxy(server.port) as proxy, Load(server.url(port=proxy.port), prefix, ["q"], **options) as load:
        proxy.reset()
        load.progress(20, BACK)
        proxy.refuse()
        proxy.drop()
        with pytest.raises(StoreConnectionError):
            load.worker.ping(1.0)
        proxy.refuse(on=False)
        load.progress(20, BACK)
        server.kill()
        with pytest.raises(StoreConnectionError):
            load.producer.ping(1.0)
        server.start()
        load.progress(20, BACK)
        proxy.freeze()
        load.progress(20, 2 * BACK)
        proxy.release()
        with full(server, prefix):
            refused = load.refused
            wait_until(lambda: load.refused > refused, 10, "publishing is refused")
        load.progress(20, BACK)


def test_consuming_goes_on_when_everything_was_lost(fresh: Callable[..., Server], make: Make, prefix: str) -> None:
    """Promise 8: also what was idle, and what had something."""
    server = fresh()
    idle, busy, producer = make(server), make(server), make(server)
    producer.publish("busy", messages("gone"))
    waiting, holding = idle.consume(["idle"]), busy.consume(["busy"])
    assert bodies(drain(holding, 1)) == ["gone"]
    assert waiting.receive(0.2) == []
    lose_everything(server, prefix)

    def comes(queue: str, consumer: Consumer) -> bool:
        try:
            producer.publish(queue, messages("after"))
        except StoreConnectionError:
            return False
        return bodies(drain(consumer, 1, 1.0)) == ["after"]

    for queue, consumer in (("idle", waiting), ("busy", holding)):
        wait_until(lambda queue=queue, consumer=consumer: comes(queue, consumer), BACK, f"{queue} goes on")


def test_what_a_dead_worker_held_keeps_its_priority_and_its_prefix(server: Server, make: Make, prefix: str) -> None:
    """Promises 9 and 10: it comes back at its old place, and nowhere else."""
    options = {"visibility_timeout": LEASE}
    mortal = ProcessMortal(server.url(), {"prefix": prefix, **options})
    engine, stranger = make(server), make(server, prefix=f"{prefix}x")
    for each in (engine, stranger):
        for priority in (2, 0, 1):
            each.publish("q", messages(f"{priority}a", f"{priority}b", priority=priority))
    assert [each.body for each in mortal.take("q", 3)] == [b"0a", b"0b", b"1a"]
    elsewhere = stranger.consume(["q"])
    theirs = drain(elsewhere, 6)
    consumer = engine.consume(["q"])
    got = drain(consumer, 3)
    mortal.die()
    back = drain(consumer, 3, LEASE + MARGIN)
    assert sorted((each.message.body, each.count) for each in back) == [(b"0a", 2), (b"0b", 2), (b"1a", 2)]
    # a nats-server serves what comes back in the order in which it does
    consumer.hand_back(sorted([*got, *back], key=lambda each: each.message.body))
    consumer.close()
    engine.publish("q", messages("0c"))
    wait_until(lambda: engine.inspector().stats("q").ready == 7, 5, "all is back")
    found = bodies(drain(engine.consume(["q"]), 7))
    assert [name[0] for name in found] == [*"0001122"]
    # what a nats-server's consumer had no room for in a moment goes back behind its neighbours
    assert found[:3] == ["0a", "0b", "0c"]
    assert sorted(found[3:]) == ["1a", "1b", "2a", "2b"]
    assert elsewhere.receive(0.3) == []
    assert bodies(theirs) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert stranger.inspector().stats("q").in_flight == 6
