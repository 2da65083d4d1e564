"""Publishing, and what a queue is."""

from __future__ import annotations

import os

import pytest

from ...errors import MessageTooLarge
from ...message import Message, QueueSpec
from .kit import Engines, acked, bodies, drain, messages, name, until


class TestPublish:
    def test_what_was_published_is_stored_and_seen_by_all(self, engines: Engines) -> None:
        queue = name()
        ids = engines().publish(queue, messages("a", "b", "c"))
        assert len(set(ids)) == 3
        other = engines()
        assert other.ready(queue) == 3
        assert bodies(drain(other.consume([queue]), 3)) == ["a", "b", "c"]

    def test_first_in_first_out_over_publishers(self, engines: Engines) -> None:
        queue, first, second = name(), engines(), engines()
        for number in range(20):
            (first, second)[number % 2].publish(queue, messages(str(number)))
        assert bodies(drain(engines().consume([queue]), 20)) == [str(number) for number in range(20)]

    def test_nothing_to_publish(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        assert engine.publish(queue, []) == []
        assert engine.ready(queue) == 0

    def test_a_message_arrives_as_it_was_sent(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        sent = Message(bytes(range(256)) + os.urandom(1000), head=b'{"type": "x", "\xc3\xa9": [1, null]}', id="job-1",
                       priority=3)
        engine.publish(queue, [sent])
        got, = drain(engines().consume([queue]), 1)
        assert (got.message.body, got.message.head, got.message.id, got.message.priority) == (
            sent.body, sent.head, sent.id, sent.priority)
        assert (got.queue, got.count, got.redelivered) == (queue, 1, False)

    def test_ids_of_jobs_need_not_be_unique(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", "b", id="same"))
        engine.publish(queue, messages("c", id="same"))
        assert bodies(drain(engine.consume([queue]), 3)) == ["a", "b", "c"]

    def test_a_large_batch(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        texts = [str(number) for number in range(2500)]
        assert len(set(engine.publish(queue, messages(*texts)))) == 2500
        consumer = engine.consume([queue])
        got = drain(consumer, 2500, timeout=20)
        assert bodies(got) == texts
        acked(consumer, got)

    def test_a_message_over_the_limit_is_refused_before_anything_is_sent(self, engines: Engines) -> None:
        queue, engine = name(), engines(max_message_size=1000)
        with pytest.raises(MessageTooLarge, match="max_message_size"):
            engine.publish(queue, messages("small", b"x" * 1001))
        assert engine.ready(queue) == 0
        engine.publish(queue, messages("small"))
        assert engine.ready(queue) == 1

    def test_without_create_a_missing_queue_takes_nothing(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        assert engine.publish(queue, messages("a"), create=False) == []
        assert engine.ready(queue) == 0
        assert queue not in engine.inspector().queues()

    def test_without_create_a_queue_that_is_there_takes_it(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, durable=False, expires=60))
        assert len(engines().publish(queue, messages("a"), create=False)) == 1
        assert engine.ready(queue) == 1

    def test_without_create_a_queue_that_was_once_published_to_takes_it(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        acked(consumer, drain(consumer, 1))
        assert len(engine.publish(queue, messages("b"), create=False)) == 1

    def test_deferred_confirms_are_stored_after_flush(self, engines: Engines) -> None:
        queue, engine = name(), engines(confirm="deferred")
        for number in range(50):
            engine.publish(queue, messages(str(number)))
        engine.flush()
        assert engines().ready(queue) == 50

    def test_two_prefixes_never_meet(self, engines: Engines) -> None:
        queue, here, there = name(), engines(), engines(prefix=name("prefix"))
        here.publish(queue, messages("here"))
        there.publish(queue, messages("there", "there"))
        here.table("t").put("key", "here")
        assert (here.ready(queue), there.ready(queue)) == (1, 2)
        assert bodies(drain(here.consume([queue]), 1)) == ["here"]
        assert dict(there.table("t").rows()) == {}
        there.delete(queue)

    def test_ping(self, engines: Engines) -> None:
        assert 0 <= engines().ping(timeout=2) < 2


class TestExpiry:
    def test_an_expired_message_is_dropped_unread(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("brief", expires=0.5), *messages("lasting", expires=60)])
        engines.advance(0.6)
        assert bodies(drain(engine.consume([queue]), 1)) == ["lasting"]
        assert engine.ready(queue) == 0

    def test_a_message_that_has_not_expired_is_delivered(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a", expires=5))
        assert bodies(drain(engine.consume([queue]), 1)) == ["a"]

    def test_a_delayed_message_expires_too(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("never", delay=0.6, expires=0.3), *messages("in time", delay=0.6, expires=60)])
        engines.advance(0.7)
        consumer = engine.consume([queue])
        assert bodies(drain(consumer, 1)) == ["in time"]
        engines.nothing(consumer)

    def test_messages_older_than_the_ttl_of_their_queue_are_dropped_unread(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, message_ttl=0.5))
        engine.publish(queue, messages("old"))
        engines.advance(0.6)
        engine.publish(queue, messages("new"))
        assert bodies(drain(engine.consume([queue]), 1)) == ["new"]

    def test_the_oldest_ready_messages_are_dropped_beyond_the_length(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, max_length=3))
        for text in "abcde":
            engine.publish(queue, messages(text))
        assert engine.ready(queue) == 3
        assert bodies(drain(engine.consume([queue]), 3)) == ["c", "d", "e"]

    def test_a_batch_longer_than_the_length(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, max_length=2))
        engine.publish(queue, messages(*"abcde"))
        assert bodies(drain(engine.consume([queue]), 2)) == ["d", "e"]

    def test_the_length_never_drops_an_unsettled_message(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, max_length=2))
        engine.publish(queue, messages("a", "b"))
        consumer = engine.consume([queue])
        held = drain(consumer, 2)
        engine.publish(queue, messages("c", "d", "e"))
        assert engine.inspector().stats(queue).in_flight == 2
        consumer.hand_back(held)
        assert bodies(drain(consumer, 4)) == ["a", "b", "d", "e"]


class TestQueues:
    def test_a_spec_is_kept_as_declared(self, engines: Engines) -> None:
        queue = name()
        spec = QueueSpec(queue, durable=False, expires=60.0, message_ttl=5.5, delivery_limit=7, max_length=9,
                         arguments={"x-max-priority": 10, "x-é": ["a", None, {"b": 1.5}]})
        engines().declare(spec)
        assert engines().spec(queue) == spec

    def test_a_changed_spec_replaces_the_old_one(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue, delivery_limit=3))
        engine.publish(queue, messages("kept"))
        engine.declare(QueueSpec(queue, delivery_limit=4))
        assert engines().spec(queue) == QueueSpec(queue, delivery_limit=4)
        assert engine.ready(queue) == 1

    def test_nobody_declared_it(self, engines: Engines) -> None:
        assert engines().spec(name()) is None

    def test_delete_takes_ready_and_delayed_messages(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue))
        engine.publish(queue, [*messages("a", "b"), *messages("c", delay=60)])
        assert engine.delete(queue) == 3
        assert engine.spec(queue) is None
        assert (engine.ready(queue), list(engine.inspector().delayed(queue))) == (0, [])
        assert queue not in engine.inspector().queues()
        assert engine.delete(queue) == 0

    def test_delete_takes_unsettled_messages_too(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(*"abcd"))
        consumer = engine.consume([queue])
        held = drain(consumer, 4)
        assert engine.delete(queue) == 0
        consumer.dead_letter(held[0], "late")
        consumer.nack(held[1])
        consumer.hand_back(held[2:])
        consumer.ack(held[3])
        engines.nothing(consumer)
        stats = engine.inspector().stats(queue)
        assert (stats.ready, stats.in_flight, stats.dead) == (0, 0, 0)

    def test_delete_leaves_dead_letters(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages("a"))
        consumer = engine.consume([queue])
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        consumer.close()
        engine.delete(queue)
        assert bodies(engine.inspector().dead(queue)) == ["a"]
        assert queue in engine.inspector().queues()

    def test_delete_if_empty(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue))
        engine.publish(queue, messages("a", delay=60))
        assert engine.delete(queue, if_empty=True) == -1
        engine.inspector().purge(queue)
        assert engine.delete(queue, if_empty=True) == 0
        assert engine.spec(queue) is None

    def test_delete_if_unused(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.declare(QueueSpec(queue))
        consumer = engines().consume([queue])
        consumer.receive(0)
        assert engine.delete(queue, if_unused=True) == -1
        assert engine.spec(queue) is not None
        consumer.close()
        assert engine.delete(queue, if_unused=True) == 0

    def test_a_deleted_queue_comes_back_for_those_who_consume_it(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        consumer = engines().consume([queue])
        engine.publish(queue, messages("a"))
        acked(consumer, drain(consumer, 1))
        engine.delete(queue)
        engine.publish(queue, messages("b"))
        assert bodies(drain(consumer, 1)) == ["b"]

    def test_consumers_are_live_holders(self, engines: Engines) -> None:
        queue, engine, other = name(), engines(), engines()
        assert engine.consumers(queue) == 0
        first, second, third = engine.consume([queue]), engine.consume([queue]), other.consume([queue])
        for consumer in (first, second, third):
            consumer.receive(0)
        assert engine.consumers(queue) == 2
        third.close()
        assert other.consumers(queue) == 1
        first.close()
        assert other.consumers(queue) == 1
        second.close()
        assert other.consumers(queue) == 0

    def test_ready_counts_what_could_be_delivered_now(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, [*messages("a", "b", "c"), *messages("later", delay=60)])
        assert engine.ready(queue) == 3
        consumer = engine.consume([queue])
        got = drain(consumer, 2)
        assert engine.ready(queue) == 1
        consumer.hand_back(got[:1])
        # asked over another connection, which the store may serve first
        until(lambda: engine.ready(queue) == 2)
        acked(consumer, got[1:])
        assert engine.ready(queue) == 2
