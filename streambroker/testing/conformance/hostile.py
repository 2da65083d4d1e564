"""Names and bodies that nobody should use, and somebody will."""

from __future__ import annotations

import os
import random

import pytest

from .kit import Engines, acked, bodies, drain, messages, name

ODD = ["a.b", "a..b", "a b", "A", "a", "{a}", "}{", "{", "a:b", "a:s:0", "a%20b", "a%", "%25", "*", "?", "[a]", "a\\*",
       "é", "e\u0301", "\u2028", "日本", "a\x00b", "a\nb", "a\tb", "~free", "~last", "@", "#", "a.#", "sb", "'\"",
       "x" * 500]


class TestNames:
    def test_each_name_is_a_queue_of_its_own(self, engines: Engines) -> None:
        start, engine, other = name("odd"), engines(), engines()
        names = [start + odd for odd in ODD]
        for each in names:
            engine.publish(each, messages(each))
        assert set(names) <= set(other.inspector().queues())
        for each in names:
            assert other.ready(each) == 1
            consumer = other.consume([each])
            got = drain(consumer, 2, timeout=0.02 if not engines.quiet else 0.1)
            got = got or drain(consumer, 1)
            assert [(delivery.queue, delivery.message.body.decode()) for delivery in got] == [(each, each)]
            acked(consumer, got)
            consumer.close()
            engine.delete(each)

    @pytest.mark.parametrize("odd", ["@", "%", "*", "~free", " "])
    def test_a_name_of_nothing_but_odd_signs(self, engines: Engines, odd: str) -> None:
        engine = engines(prefix=name("prefix"))
        engine.publish(odd, [*messages("a"), *messages("b", delay=60)])
        engine.table("t").put("row", "1")
        assert engine.inspector().queues() == [odd]
        consumer = engine.consume([odd])
        consumer.dead_letter(drain(consumer, 1)[0], "why")
        consumer.close()
        assert bodies(engine.inspector().dead(odd)) == ["a"]
        inspector = engine.inspector()
        inspector.dead_remove(odd, [letter.id for letter in inspector.dead(odd)])
        assert engine.delete(odd) == 1
        assert dict(engine.table("t").rows()) == {"row": "1"}
        engine.table("t").delete(["row"])

    def test_all_in_one_consumer(self, engines: Engines) -> None:
        start, engine = name("odd"), engines()
        names = [start + odd for odd in ODD]
        consumer = engine.consume(names)
        consumer.receive(0)
        for each in names:
            engine.publish(each, messages(each))
        got = drain(consumer, len(names))
        assert {(each.queue, each.message.body.decode()) for each in got} == {(each, each) for each in names}
        acked(consumer, got)
        for each in names:
            engine.delete(each)


class TestBodies:
    def test_random_bytes(self, engines: Engines) -> None:
        queue, engine, dice = name(), engines(), random.Random(7)
        sent = [dice.randbytes(dice.choice([0, 1, 2, 7, 100, 5000])) for _ in range(60)]
        engine.publish(queue, messages(*sent))
        assert [each.message.body for each in drain(engine.consume([queue]), 60)] == sent

    @pytest.mark.parametrize("head", [b"", b"{}", b"[]", b"no json", b"\x00\xff\n", b'{"a":', b"x" * 70000])
    @pytest.mark.parametrize("body", [b"", b"\n", b"\x00", b"}{\r\n*3\r\n"])
    def test_heads_and_bodies_are_not_read(self, engines: Engines, head: bytes, body: bytes) -> None:
        queue, engine = name(), engines()
        engine.publish(queue, messages(body, head=head, id="a|b\nc\x00é"))
        got, = drain(engine.consume([queue]), 1)
        assert (got.message.head, got.message.body, got.message.id) == (head, body, "a|b\nc\x00é")

    def test_a_megabyte(self, engines: Engines) -> None:
        queue, engine = name(), engines()
        body = os.urandom(1 << 20)
        engine.publish(queue, messages(body, body))
        got = drain(engine.consume([queue]), 2)
        assert [each.message.body == body for each in got] == [True, True]
