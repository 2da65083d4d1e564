"""Messages that the server believes to be done and did not remove."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from streambroker.engines.jetstream import janitor, stranded
from streambroker.engines.jetstream.engine import JetStreamEngine
from streambroker.testing.conformance.kit import drain, messages, until
from streambroker.testing.natsserver import NatsServer

QUEUE = "jobs"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "FIRST", 0.2)
    monkeypatch.setattr(janitor, "SWEEP", 0.2)
    monkeypatch.setattr(stranded, "APART", 0.1)


@pytest.fixture
def own(every_nats_kind: str) -> Iterator[NatsServer]:
    with NatsServer(every_nats_kind) as server:
        yield server


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


def strand(own: NatsServer, *bodies: str) -> None:
    """What a killed server may leave: it knows that these are done, and has forgotten that it had removed them."""
    engine = JetStreamEngine.from_url(own.url())
    stream = engine.names.stream(QUEUE)
    engine.publish(QUEUE, messages(*bodies))
    own.stop()
    folder, = own.directory.glob(f"**/streams/{stream}/msgs")
    shutil.copytree(folder, own.directory / "before")
    own.start()
    consumer = engine.consume([QUEUE])
    for delivery in drain(consumer, len(bodies)):
        consumer.ack(delivery)
    until(lambda: own.api(f"STREAM.INFO.{stream}")["state"]["messages"] == 0)
    engine.close()
    own.stop()
    shutil.rmtree(folder)
    (own.directory / "before").rename(folder)
    own.start()
    assert own.api(f"STREAM.INFO.{stream}")["state"]["messages"] == len(bodies)
    durable = own.api(f"CONSUMER.INFO.{stream}.{engine.names.durable(QUEUE, 0)}")
    assert (durable["num_pending"], durable["num_ack_pending"]) == (0, 0), durable


def test_they_come_again_once(own: NatsServer, caplog: pytest.LogCaptureFixture) -> None:
    """As redelivered ones, though several processes see them; the server is at its base after that."""
    strand(own, "a", "b", "c")
    engines = [JetStreamEngine.from_url(own.url()) for _ in range(3)]
    try:
        caplog.set_level(logging.WARNING, "streambroker")
        consumers = [engine.consume([QUEUE]) for engine in engines]
        got: Counter[bytes] = Counter()
        until_over = time.monotonic() + 3.0
        engines[0].publish(QUEUE, messages("d"))
        while time.monotonic() < until_over:
            for consumer in consumers:
                for delivery in consumer.receive(0.05, 5):
                    got[delivery.message.body] += 1
                    assert (delivery.redelivered, delivery.count) == ((True, 2) if delivery.message.body != b"d" else
                                                                      (False, 1))
                    consumer.ack(delivery)
        assert got == {b"a": 1, b"b": 1, b"c": 1, b"d": 1}
        until(lambda: own.api(f"STREAM.INFO.{engines[0].names.stream(QUEUE)}")["state"]["messages"] == 0)
        assert "kept 3 messages" in caplog.text
    finally:
        for engine in engines:
            engine.close()


def test_what_is_on_its_way_is_left_alone(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks all the while, under load, with messages that are held, given back and delayed."""
    monkeypatch.setattr(janitor, "SWEEP", 0.02)
    monkeypatch.setattr(stranded, "LOOKS", 10_000)
    engine = JetStreamEngine.from_url(nats.url())
    try:
        consumer = engine.consume([QUEUE])
        over = threading.Event()

        def publish() -> None:
            for number in range(3000):
                engine.publish(QUEUE, messages(str(number)))
            over.set()

        thread = threading.Thread(target=publish)
        thread.start()
        got: Counter[bytes] = Counter()
        held = []
        quiet = time.monotonic()
        while not over.is_set() or time.monotonic() - quiet < 1.5:
            for delivery in consumer.receive(0.1, 20):
                quiet = time.monotonic()
                number = int(delivery.message.body)
                if number % 100 == 7 and not delivery.redelivered:
                    consumer.nack(delivery, 0.3 if number % 200 == 7 else 0.0)
                elif number % 100 == 9:
                    held.append(delivery)
                else:
                    got[delivery.message.body] += 1
                    consumer.ack(delivery)
        thread.join()
        for delivery in held:
            got[delivery.message.body] += 1
            consumer.ack(delivery)
        assert len(got) == 3000
        assert {*got.values()} == {1}
    finally:
        engine.close()
