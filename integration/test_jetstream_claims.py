"""A message stays with its holder while that lives, whatever the server thinks of its time: one that was away, that
forgot whom it gave what, or that hands it out again. A holder that cannot be asked loses it, and learns of that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from integration.test_breaker_jetstream import put
from streambroker.engine import Consumer
from streambroker.engines.jetstream.engine import JetStreamEngine
from streambroker.message import Delivery
from streambroker.testing.conformance.kit import bodies, drain, messages, until
from streambroker.testing.conformance.mortal import ProcessMortal
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsServer

LEASE = 1.5
#: what is out again after a death in an outage is elsewhere so soon after the server's return (seconds)
BACK = 8.0


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """A server for this test alone."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def make() -> Iterator[Callable[..., JetStreamEngine]]:
    engines: list[JetStreamEngine] = []

    def connect(server: NatsServer, **options: object) -> JetStreamEngine:
        port = int(str(options.pop("port", 0)))
        engines.append(JetStreamEngine.from_url(server.url(port=port), visibility_timeout=LEASE, **options))
        return engines[-1]

    yield connect
    for engine in engines:
        engine.close()


def away(server: NatsServer, seconds: float, *, hard: bool) -> None:
    server.kill() if hard else server.stop()
    time.sleep(seconds)
    server.start()


def stored(server: NatsServer, stream: str = "sb") -> int:
    return int(server.api(f"STREAM.INFO.{stream}")["state"]["messages"])


def first(consumers: Sequence[Consumer]) -> tuple[Consumer, Delivery]:
    """What comes to one of them."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for consumer in consumers:
            for delivery in consumer.receive(0.05):
                return consumer, delivery
    raise AssertionError("nothing comes")


def again(server: NatsServer, delivery: Delivery) -> None:
    """Have the server hand it out once more."""
    put(server, delivery.place.reply, b"-NAK")


@pytest.mark.parametrize("hard", [True, False])
def test_an_outage_longer_than_the_lease_takes_nothing_from_its_holder(
        own: NatsServer, make: Callable[..., JetStreamEngine], hard: bool) -> None:
    holder, idle = make(own), make(own)
    holder.publish("q", messages(*"abcd"))
    holding = holder.consume(["q"])
    held = drain(holding, 4)
    waiting = idle.consume(["q"])
    assert waiting.receive(0.2, 8) == []
    for seconds in (2 * LEASE, 0.0, 3 * LEASE):
        away(own, seconds, hard=hard)
        assert waiting.receive(3 * LEASE, 8) == []
        assert holding.receive(0.2, 8) == []
    assert not any(delivery.lost for delivery in held)
    holding.nack(held[0])
    back = drain(holding, 1) or drain(waiting, 1)
    # none of the deliveries that were dropped counts
    assert [(each.message.body, each.count) for each in back] == [(b"a", 2)]
    for delivery in held[1:]:
        holding.ack(delivery)
    until(lambda: stored(own) == 1)


@pytest.mark.parametrize("hard", [True, False])
def test_what_was_not_started_before_an_outage_is_started_once(
        own: NatsServer, make: Callable[..., JetStreamEngine], hard: bool) -> None:
    holder, idle = make(own), make(own)
    holding = holder.consume(["q"])
    assert holding.receive(0.2, 4) == []
    holder.publish("q", messages(*"abcd"))
    until(lambda: len(holder.holder.held) == 4)
    waiting = idle.consume(["q"])
    away(own, 2 * LEASE, hard=hard)
    got: list[Delivery] = []
    deadline = time.monotonic() + BACK
    while time.monotonic() < deadline:
        got += holding.receive(0.1, 8) + waiting.receive(0.1, 8)
    assert sorted(bodies(got)) == [*"abcd"]


def test_who_dies_in_an_outage_loses_it_soon_after(own: NatsServer, make: Callable[..., JetStreamEngine]) -> None:
    idle = make(own)
    mortal = ProcessMortal(own.url(), {"visibility_timeout": LEASE})
    idle.publish("q", messages("a", "b"))
    assert len(mortal.take("q", 2)) == 2
    waiting = idle.consume(["q"])
    own.kill()
    mortal.die()
    time.sleep(2 * LEASE)
    own.start()
    assert sorted(bodies(drain(waiting, 2, BACK))) == ["a", "b"]


def test_who_starts_after_an_outage_takes_nothing_either(own: NatsServer, make: Callable[..., JetStreamEngine]) -> None:
    holder = make(own)
    holder.publish("q", messages("a"))
    held = drain(holder.consume(["q"]), 1)
    until(lambda: bool(held[0].place.recorded))
    away(own, 2 * LEASE, hard=False)
    fresh = make(own).consume(["q"])
    assert fresh.receive(3 * LEASE) == []
    assert not held[0].lost


def test_what_was_just_handed_out_when_the_server_was_killed_is_not_forgotten(
        own: NatsServer, make: Callable[..., JetStreamEngine]) -> None:
    """The server may not have stored that it did."""
    holder, idle = make(own), make(own)
    consumers = [holder.consume(["q"]), idle.consume(["q"])]
    for number in range(6):
        holder.publish("q", messages(str(number)))
        consumer, held = first(consumers)
        assert bodies([held]) == [str(number)]
        own.restart(hard=True)
        assert [each.receive(1.5) for each in consumers] == [[], []]
        consumer.ack(held)
        until(lambda: stored(own) == 0)


def test_what_was_acknowledged_while_the_server_was_away_is_done(
        own: NatsServer, make: Callable[..., JetStreamEngine]) -> None:
    holder, idle = make(own), make(own)
    holder.publish("q", messages(*"abc"))
    holding = holder.consume(["q"])
    held = drain(holding, 3)
    waiting = idle.consume(["q"])
    own.kill()
    for delivery in held:
        holding.ack(delivery)
    time.sleep(2 * LEASE)
    own.start()
    assert waiting.receive(3 * LEASE, 8) == []
    until(lambda: stored(own) == 0)


@pytest.mark.parametrize("how", ["nack", "hand_back", "dead_letter"])
def test_what_was_given_back_while_the_server_was_away_goes_back_once(
        own: NatsServer, make: Callable[..., JetStreamEngine], how: str) -> None:
    holder, idle = make(own), make(own)
    holder.publish("q", messages("a"))
    holding = holder.consume(["q"])
    held = drain(holding, 1)
    waiting = idle.consume(["q"])
    own.kill()
    time.sleep(2 * LEASE)
    if how == "dead_letter":
        holding.dead_letter(held[0], "broken")
    else:
        getattr(holding, how)([held[0]] if how == "hand_back" else held[0])
    own.start()
    got = drain(waiting, 1, BACK if how != "dead_letter" else 3 * LEASE)
    assert [each.count for each in got] == {"nack": [2], "hand_back": [1], "dead_letter": []}[how]
    assert len(list(idle.inspector().dead("q"))) == (how == "dead_letter")
    for delivery in got:
        waiting.ack(delivery)
    until(lambda: stored(own) == 0)


def test_a_message_that_is_handed_out_again_stays_where_it_is(
        nats_servers: Callable[[str], NatsServer], every_nats_kind: str, prefix: str,
        make: Callable[..., JetStreamEngine]) -> None:
    """On each server: the renewals and the acknowledgement of the first delivery hold for the newest one."""
    server = nats_servers(every_nats_kind)
    holder, other = make(server, prefix=prefix), make(server, prefix=prefix)
    holder.publish("q", messages("a"))
    holding = holder.consume(["q"])
    held = drain(holding, 1)
    waiting = other.consume(["q"])
    assert waiting.receive(0.2) == []
    for _ in range(3):
        again(server, held[0])
        assert waiting.receive(0.3) == []
        assert holding.receive(0.1) == []
    assert waiting.receive(2 * LEASE) == []
    assert not held[0].lost
    info = server.api(f"CONSUMER.INFO.{prefix}.q_0")
    assert (info["delivered"]["consumer_seq"], info["num_ack_pending"]) == (4, 1)
    holding.ack(held[0])
    until(lambda: stored(server, prefix) == 0)


def test_two_receivers_of_what_nobody_has_give_it_to_one(
        nats_servers: Callable[[str], NatsServer], prefix: str, make: Callable[..., JetStreamEngine]) -> None:
    server = nats_servers("nats")
    mortal = ProcessMortal(server.url(), {"prefix": prefix, "visibility_timeout": LEASE})
    engines = [make(server, prefix=prefix) for _ in range(4)]
    engines[0].publish("q", messages(*map(str, range(50))))
    assert len(mortal.take("q", 50)) == 50
    consumers = [engine.consume(["q"]) for engine in engines]
    mortal.stop()
    got: list[Delivery] = []
    deadline = time.monotonic() + LEASE + 5
    while time.monotonic() < deadline:
        for consumer in consumers:
            got += consumer.receive(0.01, 20)
    assert sorted(map(int, bodies(got))) == [*range(50)]
    assert {each.count for each in got} == {2}
    mortal.resume()
    mortal.settle("nack", *[each.id for each in got])
    assert [consumer.receive(0.2, 50) for consumer in consumers] == [[], [], [], []]
    assert not any(each.lost for each in got)
    mortal.die()


def test_who_was_cut_off_for_longer_than_the_lease_learns_that_it_has_lost(
        nats_servers: Callable[[str], NatsServer], prefix: str, make: Callable[..., JetStreamEngine]) -> None:
    server = nats_servers("nats")
    with Proxy(server.port) as proxy:
        holder, other = make(server, prefix=prefix, port=proxy.port), make(server, prefix=prefix)
        holder.publish("q", messages("a"))
        holding = holder.consume(["q"])
        held = drain(holding, 1)
        waiting = other.consume(["q"])
        proxy.refuse()
        assert proxy.reset() > 0
        got = drain(waiting, 1, LEASE + 5)
        assert bodies(got) == ["a"]
        assert not held[0].lost  # nobody could tell
        proxy.refuse(False)
        until(lambda: held[0].lost)
        holding.nack(held[0])
        assert waiting.receive(2 * LEASE) == []
        assert not got[0].lost


def test_who_was_cut_off_and_missed_by_nobody_goes_on(
        nats_servers: Callable[[str], NatsServer], prefix: str, make: Callable[..., JetStreamEngine]) -> None:
    server = nats_servers("nats")
    with Proxy(server.port) as proxy:
        holder, other = make(server, prefix=prefix, port=proxy.port), make(server, prefix=prefix)
        holder.publish("q", messages("a", "b"))
        holding = holder.consume(["q"])
        held = drain(holding, 2)
        proxy.refuse()
        assert proxy.reset() > 0
        time.sleep(2 * LEASE)
        proxy.refuse(False)
        until(lambda: holder.link.connected)
        waiting = other.consume(["q"])
        assert waiting.receive(3 * LEASE, 8) == []
        assert not held[0].lost
        holding.nack(held[0])
        assert [(each.message.body, each.count) for each in drain(waiting, 1)] == [(b"a", 2)]


def test_questions_of_others_break_nothing(
        nats_servers: Callable[[str], NatsServer], prefix: str, make: Callable[..., JetStreamEngine]) -> None:
    server = nats_servers("nats")
    engine = make(server, prefix=prefix)
    engine.publish("q", messages("a"))
    consumer = engine.consume(["q"])
    held = drain(consumer, 1)
    place = held[0].place
    subject = engine.names.presence(engine.holder.name)
    for question in (b"{", b"{}", b'{"kind":"take","of":5}', b'{"kind":"take","of":[["s",[[1,2]]]]}',
                     b'{"kind":"taken","of":[["s",[[1,2,null]]]]}', b'{"kind":"take","of":[["s",[[1e999,2,3]]]]}'):
        assert server.call(subject, question) == b"[]"

    def ask(entered: float) -> object:
        question = {"kind": "take", "of": [[place.stream, [[place.sequence, 1, entered * 1000]]]]}
        return json.loads(server.call(subject, json.dumps(question).encode()))

    assert ask(place.entered) == [[place.stream, place.sequence, "has", 1]]
    # the same number in a stream that was made anew
    assert ask(place.entered - 1) == []
    assert not held[0].lost
