"""Transient queues: reply queues, control queues, event queues."""

from __future__ import annotations

from ...message import QueueSpec
from .kit import Engines, acked, bodies, drain, messages, name, until


def reply(expires: float = 1.0) -> QueueSpec:
    return QueueSpec(name("reply"), durable=False, expires=expires)


class TestTransient:
    def test_buffers_from_its_declaration_on(self, engines: Engines) -> None:
        spec, engine = reply(30), engines()
        engine.declare(spec)
        engines().publish(spec.name, messages("a", "b"), create=False)
        assert bodies(drain(engine.consume([spec.name]), 2)) == ["a", "b"]
        assert engine.inspector().stats(spec.name).durable is False

    def test_is_gone_after_its_time(self, engines: Engines) -> None:
        spec, engine = reply(0.5), engines()
        engine.declare(spec)
        engine.publish(spec.name, messages("a"), create=False)
        engines.advance(2.0)
        assert engine.publish(spec.name, messages("b"), create=False) == []
        assert engine.ready(spec.name) == 0
        until(lambda: engine.spec(spec.name) is None and spec.name not in engine.inspector().queues())

    def test_publishing_does_not_keep_it(self, engines: Engines) -> None:
        spec, engine = reply(0.6), engines()
        engine.declare(spec)
        for _ in range(3):
            engine.publish(spec.name, messages("a"), create=False)
            engines.advance(0.8)
        assert engine.publish(spec.name, messages("a"), create=False) == []

    def test_a_new_declaration_keeps_it(self, engines: Engines) -> None:
        spec, engine = reply(0.8), engines()
        engine.declare(spec)
        engine.publish(spec.name, messages("a"), create=False)
        for _ in range(4):
            engines.advance(0.4)
            engine.declare(spec)
        assert bodies(drain(engine.consume([spec.name]), 1)) == ["a"]

    def test_a_consumer_keeps_it(self, engines: Engines) -> None:
        spec, engine, other = reply(1.0), engines(), engines()
        engine.declare(spec)
        consumer = engine.consume([spec.name])
        for _ in range(6):
            consumer.receive(0)
            engines.advance(0.4)
        assert len(other.publish(spec.name, messages("a"), create=False)) == 1
        assert bodies(drain(consumer, 1)) == ["a"]

    def test_a_consumer_that_nobody_drives_keeps_it(self, engines: Engines) -> None:
        spec, engine, other = reply(1.0), engines(), engines()
        engine.declare(spec)
        consumer = engine.consume([spec.name])
        consumer.receive(0)
        engines.advance(2.5)
        assert len(other.publish(spec.name, messages("a"), create=False)) == 1
        assert bodies(drain(consumer, 1)) == ["a"]

    def test_goes_some_time_after_its_consumer(self, engines: Engines) -> None:
        spec, engine, other = reply(0.6), engines(), engines()
        engine.declare(spec)
        consumer = engine.consume([spec.name])
        consumer.receive(0)
        consumer.close()
        assert len(other.publish(spec.name, messages("a"), create=False)) == 1
        engines.advance(1.6)
        assert other.publish(spec.name, messages("b"), create=False) == []

    def test_its_rows_go_with_it(self, engines: Engines) -> None:
        spec, engine, other = reply(0.5), engines(), engines()
        engine.declare(spec)
        table = engine.table(name("bindings"))
        table.put("own", "1", queue=spec.name)
        table.put("free", "2")
        assert dict(table.rows()) == {"own": "1", "free": "2"}
        engines.advance(0.6)
        engine.declare(QueueSpec(name("any")))
        consumer = other.consume([name("any")])
        consumer.receive(0)
        until(lambda: dict(table.rows()) == {"free": "2"})

    def test_its_rows_go_when_it_is_deleted(self, engines: Engines) -> None:
        spec, engine = reply(60), engines()
        engine.declare(spec)
        table = engine.table(name("bindings"))
        table.put("own", "1", queue=spec.name)
        engine.delete(spec.name)
        until(lambda: dict(table.rows()) == {})

    def test_a_durable_queue_stays(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue))
        engine.publish(queue, messages("a"))
        engines.advance(1.5)
        assert engine.spec(queue) == QueueSpec(queue)
        assert bodies(drain(engine.consume([queue]), 1)) == ["a"]

    def test_request_and_reply(self, engines: Engines) -> None:
        requests, server, client = name(), engines(), engines()
        worker = server.consume([requests])
        for number in range(5):
            spec = reply(10)
            client.declare(spec)
            client.publish(requests, messages(spec.name))
            asked = drain(worker, 1)
            server.publish(asked[0].message.body.decode(), messages(str(number)), create=False)
            acked(worker, asked)
            consumer = client.consume([spec.name], no_ack=True)
            assert bodies(drain(consumer, 1)) == [str(number)]
            consumer.close()
            assert client.delete(spec.name) == 0
