"""Broadcasts: a copy for each subscriber that listens, nothing stored."""

from __future__ import annotations

import select
import threading
import time

import pytest

from ...errors import Closed
from ...message import Message
from .kit import Engines, hear, messages, name, until


def one(text: str) -> Message:
    return messages(text)[0]


class TestBroadcast:
    def test_every_subscriber_gets_a_copy(self, engines: Engines) -> None:
        topic, sender = name("topic"), engines()
        subscriptions = [engines().subscribe() for _ in range(3)]
        for subscription in subscriptions:
            subscription.add(topic)
        sender.broadcast(topic, one("a"), key="k")
        sender.broadcast(topic, one("b"))
        for subscription in subscriptions:
            got = hear(subscription, 2)
            assert [(each[0], each[1], each[2].body) for each in got] == [(topic, "k", b"a"), (topic, "", b"b")]

    def test_the_message_is_whole(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        subscription = engines().subscribe()
        subscription.add(topic)
        sent = messages(bytes(range(256)), head=b'{"a": 1}', id="job\n1", priority=3)[0]
        engine.broadcast(topic, sent, key="a.b")
        (_, _, got), = hear(subscription, 1)
        assert (got.body, got.head, got.id) == (sent.body, sent.head, sent.id)

    def test_the_sender_hears_itself(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        subscription = engine.subscribe()
        subscription.add(topic)
        engine.broadcast(topic, one("a"))
        assert [each[2].body for each in hear(subscription, 1)] == [b"a"]

    def test_nothing_is_stored(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        engine.broadcast(topic, one("before"))
        subscription = engine.subscribe()
        subscription.add(topic)
        engine.broadcast(topic, one("after"))
        assert [each[2].body for each in hear(subscription, 1)] == [b"after"]
        assert subscription.receive(engines.quiet) == []

    def test_listening_starts_before_add_returns(self, engines: Engines) -> None:
        topic, sender = name("topic"), engines()
        subscription = engines().subscribe()
        for number in range(20):
            subscription.add(f"{topic}{number}")
            sender.broadcast(f"{topic}{number}", one("a"))
        assert len(hear(subscription, 20)) == 20

    def test_topics_are_kept_apart(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        names = [topic + odd for odd in ("", ".a", "*", "?", "[a]", "/a", " é")] + [topic.upper()]
        subscriptions = {each: engine.subscribe() for each in names}
        for each, subscription in subscriptions.items():
            subscription.add(each)
        for each in names:
            engine.broadcast(each, one(each))
        for each, subscription in subscriptions.items():
            assert [got[2].body.decode() for got in hear(subscription, 1)] == [each]
            assert subscription.receive(0) == []

    @pytest.mark.parametrize(("pattern", "taken"), [
        ("", {"a", "a.b", "a.b.c", "x", ""}),
        ("#", {"a", "a.b", "a.b.c", "x", ""}),
        ("a", {"a"}),
        ("a.*", {"a.b"}),
        ("a.#", {"a", "a.b", "a.b.c"}),
        ("*.b.#", {"a.b", "a.b.c"}),
        ("#.c", {"a.b.c"}),
        ("*", {"a", "x", ""}),
        ("a.b.*", {"a.b.c"}),
    ])
    def test_patterns(self, engines: Engines, pattern: str, taken: set[str]) -> None:
        topic, engine = name("topic"), engines()
        subscription = engine.subscribe()
        subscription.add(topic, pattern)
        end = engine.subscribe()
        end.add(topic)
        keys = ["a", "a.b", "a.b.c", "x", ""]
        for key in keys:
            engine.broadcast(topic, one("m"), key=key)
        assert {key for _, key, _ in hear(end, len(keys))} == set(keys)
        got = hear(subscription, len(taken)) + subscription.receive(engines.quiet)
        assert sorted(key for _, key, _ in got) == sorted(taken)

    def test_several_patterns_give_one_copy(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        subscription = engine.subscribe()
        subscription.add(topic, "a.#")
        subscription.add(topic, "*.b")
        subscription.add(topic, "*.b")
        engine.broadcast(topic, one("m"), key="a.b")
        got = hear(subscription, 1) + subscription.receive(engines.quiet)
        assert [key for _, key, _ in got] == ["a.b"]

    def test_discard(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        subscription = engine.subscribe()
        subscription.add(topic, "a")
        subscription.add(topic, "b")
        subscription.discard(topic, "a")
        subscription.discard(topic, "never added")
        engine.broadcast(topic, one("m"), key="a")
        engine.broadcast(topic, one("m"), key="b")
        got = hear(subscription, 1) + subscription.receive(engines.quiet)
        assert [key for _, key, _ in got] == ["b"]

    def test_waiting_and_sources(self, engines: Engines) -> None:
        topic, engine = name("topic"), engines()
        subscription = engines().subscribe()
        subscription.add(topic)
        assert subscription.receive(0) == []
        start = time.monotonic()
        assert subscription.receive(0.3) == []
        assert 0.25 < time.monotonic() - start < 1.5
        engine.broadcast(topic, one("a"))
        readable, _, _ = select.select(list(subscription.sources()), [], [], 5.0)
        assert readable
        until(lambda: [each[2].body for each in subscription.receive(0)] == [b"a"])
        timer = threading.Timer(0.2, lambda: engine.broadcast(topic, one("b")))
        timer.start()
        assert len(hear(subscription, 1)) == 1
        timer.join()

    def test_a_closed_one_says_so(self, engines: Engines) -> None:
        subscription = engines().subscribe()
        subscription.add(name("topic"))
        subscription.close()
        subscription.close()
        with pytest.raises(Closed):
            subscription.receive(0)

    def test_prefixes_never_meet(self, engines: Engines) -> None:
        topic, engine, stranger = name("topic"), engines(), engines(prefix=name("prefix"))
        here, there = engine.subscribe(), stranger.subscribe()
        here.add(topic)
        there.add(topic)
        stranger.broadcast(topic, one("stranger"))
        engine.broadcast(topic, one("friend"))
        assert [each[2].body for each in hear(here, 1)] == [b"friend"]
        assert [each[2].body for each in hear(there, 1)] == [b"stranger"]
        assert here.receive(engines.quiet) == []
