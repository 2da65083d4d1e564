"""Acknowledgements that are waited for (`ack_confirm`), over a link that hangs or is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dramatiq.errors import ConnectionClosed

from integration.dramatiq_worker import dramatiq_place
from integration.stores import Server
from streambroker.dramatiq import StreamBroker
from streambroker.testing.faults import Proxy
from tests.dramatiq_rig import message, take, until

pytestmark = pytest.mark.stores

Make = Callable[..., StreamBroker]


@pytest.fixture
def make(server: Server, proxy: Proxy, prefix: str) -> Iterator[Make]:
    """`make(port, **options)` makes a broker."""
    made: list[StreamBroker] = []

    def make(port: int, **options: Any) -> StreamBroker:
        kind, url = dramatiq_place(server)
        made.append(kind(url=url.replace(str(server.port), str(port)), prefix=prefix, **options))
        return made[-1]

    yield make
    proxy.refuse(on=False)
    proxy.release()
    for broker in made:
        broker.close()


def test_it_waits_for_the_store(make: Make, server: Server, proxy: Proxy) -> None:
    broker = make(proxy.port, ack_confirm=True)
    for number in range(4):
        broker.enqueue(message(number))
    consumer = broker.consume("default", prefetch=4, timeout=100)
    got = take(consumer, 4)
    consumer.ack(got[0])
    proxy.hold("down")
    threads = [threading.Thread(target=consumer.ack, args=(each,)) for each in got[1:]]
    for thread in threads:
        thread.start()
    threads[0].join(0.5)
    assert all(thread.is_alive() for thread in threads)
    proxy.release()
    for thread in threads:
        thread.join(10)
    stats = make(server.port).engine.inspector().stats("default")
    assert (stats.ready, stats.in_flight) == (0, 0)


def test_one_that_failed_is_no_ack_and_may_be_repeated(make: Make, server: Server, proxy: Proxy) -> None:
    broker = make(proxy.port, ack_confirm=True, publish_timeout=300)
    broker.enqueue(message(1))
    consumer = broker.consume("default", timeout=100)
    got, = take(consumer, 1)
    proxy.refuse()
    proxy.drop()
    with pytest.raises(ConnectionClosed):
        consumer.ack(got)
    looker = make(server.port).engine.inspector()

    def left() -> int:
        # who is cut off cannot tell that it holds it
        stats = looker.stats("default")
        return stats.ready + stats.in_flight

    assert left() == 1
    proxy.refuse(on=False)
    until(lambda: broker.engine.ping() > 0)
    consumer.ack(got)
    assert left() == 0
    broker.close()
    assert left() == 0


def test_a_closed_broker_is_not_waited_for(make: Make, server: Server) -> None:
    broker = make(server.port, ack_confirm=True)
    broker.enqueue(message(1))
    consumer = broker.consume("default", timeout=100)
    got, = take(consumer, 1)
    broker.close()
    consumer.ack(got)
    consumer.ack(got)
