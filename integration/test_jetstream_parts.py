"""Parts of the JetStream engine where the seam's suite does not look: copies of tables, the relay of delayed messages,
subscriptions over a broken link, dead letters of foreign messages."""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import pytest

from streambroker.connection import connect
from streambroker.engines.jetstream import janitor, rows
from streambroker.engines.jetstream.delays import delay_frame, due_of, late_filter
from streambroker.engines.jetstream.engine import JetStreamEngine
from streambroker.engines.jetstream.envelope import Envelope, decode
from streambroker.engines.jetstream.link import Frame
from streambroker.engines.jetstream.stored import run, subjects, walk
from streambroker.errors import MessageTooLarge, StoreConnectionError
from streambroker.message import Message, QueueSpec
from streambroker.testing.conformance.kit import acked, bodies, drain, hear, messages, name, until
from streambroker.testing.natsserver import NatsServer, available_nats_kinds

Make = Callable[..., JetStreamEngine]
OLD = "nats210" if "nats210" in available_nats_kinds() else "nats"


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """To be stopped, killed, frozen, emptied."""
    with NatsServer(OLD) as server:
        yield server


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(server, **options)`: an engine, closed when the test is over."""
    engines: list[JetStreamEngine] = []

    def start(server: NatsServer, **options: object) -> JetStreamEngine:
        engine = JetStreamEngine.from_url(server.url(), **options)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()


class TestTables:
    def test_a_deleted_stream_is_an_empty_table(self, own: NatsServer, make: Make) -> None:
        reader, writer = make(own).table("t"), make(own).table("t")
        writer.put("a", "1")
        assert dict(reader.rows()) == {"a": "1"}
        own.api("STREAM.DELETE.sb_state")
        assert dict(reader.rows()) == {}
        assert writer.put("b", "2") is True
        assert dict(reader.rows()) == dict(writer.rows()) == {"b": "2"}

    def test_a_stream_made_again_is_read_as_a_whole(self, own: NatsServer, make: Make) -> None:
        reader, writer = make(own).table("t"), make(own).table("t")
        writer.put("a", "1")
        assert dict(reader.rows()) == {"a": "1"}
        own.api("STREAM.DELETE.sb_state")
        for row in "xyz":
            writer.put(row, row)
        assert dict(reader.rows()) == {"x": "x", "y": "y", "z": "z"}

    def test_unchanged_rows_are_the_same_object(self, own: NatsServer, make: Make) -> None:
        table, other = make(own).table("t"), make(own).table("t")
        table.put("a", "1")
        before = table.rows()
        assert table.rows() is before
        table.put("a", "1", queue="reply")
        assert table.rows() is before
        other.put("b", "2")
        assert table.rows() is not before

    def test_many_changes_at_once(self, own: NatsServer, make: Make) -> None:
        reader, writer = make(own).table("t"), make(own).table("t")
        writer.put("first", "1")
        reader.rows()
        for number in range(rows.STEPS * 2):
            writer.put(str(number), "x")
        writer.delete(["first", "3"])
        assert set(reader.rows()) == {str(number) for number in range(rows.STEPS * 2)} - {"3"}

    def test_a_copy_that_was_idle_forgets_what_was_removed_long_ago(
            self, own: NatsServer, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rows, "REMOVED", 0.4)
        reader, writer = make(own).table("t"), make(own).table("t")
        writer.put("a", "1")
        writer.put("b", "2")
        assert dict(reader.rows()) == {"a": "1", "b": "2"}
        writer.delete(["a"])
        own.api("STREAM.PURGE.sb_state", {"filter": make(own).names.row("t", "a")})
        time.sleep(0.3)
        assert dict(reader.rows()) == {"b": "2"}

    def test_a_row_written_again_outlives_its_janitor(self, own: NatsServer, make: Make) -> None:
        engine = make(own)
        table = engine.table("t")
        spec = QueueSpec(name("reply"), durable=False, expires=30)
        for _ in range(20):
            engine.declare(spec)
            table.put("own", "1", queue=spec.name)
            own.api(f"CONSUMER.DELETE.sb_tmp.{engine.names.transient_durable(spec.name)}")
        engine.declare(spec)
        table.put("own", "1", queue=spec.name)
        engine.consume([name("any")])
        time.sleep(2.5)
        assert dict(table.rows()) == {"own": "1"}

    def test_removed_rows_leave_nothing(self, own: NatsServer, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (janitor, rows):
            monkeypatch.setattr(module, "REMOVED", 0.5)
        engine, other = make(own), make(own)
        table, other_table = engine.table("t"), other.table("t")
        for row in "abc":
            table.put(row, row)
        other_table.rows()
        table.delete("ac")
        time.sleep(0.6)
        engine.consume([name("any")])
        covered = engine.names.rows("t")
        until(lambda: list(run(engine, partial(subjects, engine, "sb_state", covered))) == [engine.names.row("t", "b")])
        table.put("a", "again")
        assert dict(other_table.rows()) == dict(table.rows()) == {"a": "again", "b": "b"}

    def test_nobody_answers(self, own: NatsServer, make: Make) -> None:
        table = make(own, publish_timeout=1.0).table("t")
        table.put("a", "1")
        table.rows()
        own.freeze()
        try:
            start = time.monotonic()
            with pytest.raises(StoreConnectionError):
                table.rows(patient=False)
            assert time.monotonic() - start < 3
            assert dict(table.rows(max_age=3600)) == {"a": "1"}
        finally:
            own.thaw()


_RELAY = """
import signal, sys, time
from streambroker.engines.jetstream.engine import JetStreamEngine
engine = JetStreamEngine.from_url(sys.argv[1])
consumer = engine.consume(["nothing-comes"])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
engine.close()
"""


class Relays:
    """Consuming processes."""

    def __init__(self, server: NatsServer, count: int) -> None:
        self._server = server
        self._processes = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", _RELAY, self._server.url()], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    def replace_one(self, number: signal.Signals) -> None:
        self._end(self._processes.pop(0), number)
        self._processes.append(self._start())

    def _end(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        process.send_signal(number)
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()

    def close(self) -> None:
        for process in self._processes:
            self._end(process, signal.SIGKILL)


class TestRelay:
    """On the oldest server: it brings everything that waits."""

    COUNT = 600

    def publish(self, engine: JetStreamEngine, queue: str) -> None:
        engine.streams.ensure(engine.names.late)
        engine.streams.ensure(engine.names.main)
        frames = []
        for number in range(self.COUNT):
            plain = Envelope(Message(b"x" * 200, id="id"))
            frame = delay_frame(engine, queue, 0, random.uniform(0.5, 5.0), plain, f"{queue}-{number}")
            told = Envelope(Message(b"x" * 200, id=f"{number} {due_of(frame.subject)}"))
            frames.append(frame._replace(data=told.encode()))
        assert None not in engine.link.requests(frames, 10)

    def late(self, engine: JetStreamEngine, queue: str) -> tuple[Counter[str], list[float]]:
        """How often each came, and how late, in order."""
        until(lambda: not engine.inspector().stats(queue).delayed and len(
            list(walk(engine, engine.names.late, late_filter(engine.names, queue)))) == 0, timeout=20)
        counts: Counter[str] = Counter()
        late = []
        for stored in walk(engine, engine.names.main, engine.names.ready(queue, "*")):
            number, due = decode(stored.data).message.id.split()
            counts[number] += 1
            late.append(stored.time - float(due))
        return counts, sorted(late)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_relays_that_end(self, own: NatsServer, make: Make, number: signal.Signals) -> None:
        engine, queue, relays = make(own), name(), Relays(own, 3)
        try:
            self.publish(engine, queue)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                time.sleep(0.5)
                relays.replace_one(number)
            counts, late = self.late(engine, queue)
        finally:
            relays.close()
        assert (len(counts), set(counts.values())) == (self.COUNT, {1})
        assert late[0] >= 0
        assert late[self.COUNT // 2] < 0.3
        assert late[-1] < 8

    def test_a_server_that_is_killed(self, own: NatsServer, make: Make) -> None:
        engine, queue, relays = make(own), name(), Relays(own, 2)
        try:
            self.publish(engine, queue)
            for _ in range(3):
                time.sleep(0.7)
                own.restart(hard=True)
            counts, late = self.late(engine, queue)
        finally:
            relays.close()
        assert (len(counts), set(counts.values())) == (self.COUNT, {1})
        assert late[0] >= 0

    def test_an_idle_relay_has_no_consumer_and_wakes_at_once(self, own: NatsServer, make: Make) -> None:
        engine, queue = make(own), name()
        consumer = engine.consume([queue])
        assert consumer.receive(0.5) == []
        assert engine.names.late not in [stream["name"] for stream in own.streams()]
        engine.publish(queue, messages("a", delay=0.4))
        start = time.monotonic()
        assert bodies(drain(consumer, 1)) == ["a"]
        assert time.monotonic() - start < 1.0

    def test_a_transient_queue_that_is_gone_takes_nothing(self, own: NatsServer, make: Make) -> None:
        engine = make(own)
        engine.consume([name("any")])
        spec = QueueSpec(name("reply"), durable=False, expires=30)
        engine.declare(spec)
        engine.publish(spec.name, messages("a", delay=0.5), create=False)
        own.api(f"CONSUMER.DELETE.sb_tmp.{engine.names.transient_durable(spec.name)}")
        until(lambda: own.api("STREAM.INFO.sb_late")["state"]["messages"] == 0)
        assert own.api("STREAM.INFO.sb_tmp")["state"]["messages"] == 0


class TestSubscription:
    def test_a_restart_is_survived(self, own: NatsServer, make: Make) -> None:
        listener, sender, topic = make(own).subscribe(), make(own), name("topic")
        listener.add(topic)
        own.restart()

        def heard() -> bool:
            try:
                sender.broadcast(topic, messages("a")[0])
            except StoreConnectionError:
                return False
            return bool(hear(listener, 1, timeout=0.3))

        until(heard, timeout=10)

    def test_a_lost_store_is_told(self, own: NatsServer, make: Make) -> None:
        listener = make(own, reconnect_timeout=0.5).subscribe()
        listener.add(name("topic"))
        assert listener.due() is None
        own.stop()
        start = time.monotonic()
        with pytest.raises(StoreConnectionError):
            while time.monotonic() - start < 5:
                due = listener.due()
                select.select(list(listener.sources()), [], [], 5.0 if due is None else due)
                listener.receive(0)
        assert 0.4 < time.monotonic() - start < 3

    def test_broadcasting_to_nobody_raises_soon(self, own: NatsServer, make: Make) -> None:
        engine, topic = make(own), name("topic")
        engine.broadcast(topic, messages("a")[0])
        for stop, start in ((own.freeze, own.thaw), (own.stop, own.start)):
            stop()
            began = time.monotonic()
            with pytest.raises(StoreConnectionError):
                engine.broadcast(topic, messages("a")[0])
            assert time.monotonic() - began < 3
            start()

    def test_too_large(self, own: NatsServer, make: Make) -> None:
        engine = make(own)
        with pytest.raises(MessageTooLarge, match="1048576"):
            engine.broadcast(name("topic"), Message(os.urandom(1 << 20)))
        assert engine.ping() < 5
        assert engine.link.epoch == 1


class TestForeign:
    def test_a_message_of_others_is_buried_as_it_is_and_can_go_back(self, own: NatsServer, make: Make) -> None:
        engine, queue = make(own), name()
        engine.publish(queue, messages("ours"))
        consumer = engine.consume([queue])
        drain(consumer, 1)
        reply = engine.link.request(Frame(engine.names.ready(queue, 0), b"\xff theirs"), 5)
        assert "seq" in json.loads(reply.data)
        assert consumer.receive(0.3) == []
        inspector = engine.inspector()
        until(lambda: inspector.stats(queue).dead == 1)
        letter, = inspector.dead(queue)
        assert (letter.message.body, dict(letter.fields)) == (b"\xff theirs", {"data": b"\xff theirs"})
        assert "not a message" in letter.reason
        consumer.close()
        assert inspector.replay(queue, [letter.id]) == 1
        stored, = (each for each in walk(engine, engine.names.main, engine.names.ready(queue, "*"))
                   if each.data == b"\xff theirs")
        assert stored.subject == engine.names.ready(queue, 0)


    def test_the_largest_messages_can_be_buried(self, own: NatsServer, make: Make) -> None:
        engine, queue = make(own), name()
        engine.publish(queue, messages("first"))
        largest = engine.link.max_payload - 1024
        engine.publish(queue, [Message(os.urandom(largest - 2))])
        theirs = Frame(engine.names.ready(queue, 0), b"\xff" * engine.link.max_payload)
        assert "seq" in json.loads(engine.link.request(theirs, 5).data)
        consumer = engine.consume([queue])
        for delivery in drain(consumer, 3, timeout=1.0):
            consumer.dead_letter(delivery, "because \u00e9" * 1000)
        inspector = engine.inspector()
        until(lambda: inspector.stats(queue).dead == 3)
        sizes = sorted(len(letter.message.body) for letter in inspector.dead(queue))
        assert sizes[:2] == [5, largest - 2]
        assert largest < sizes[2] < engine.link.max_payload


class TestWalk:
    def test_sparse_and_dense(self, own: NatsServer, make: Make) -> None:
        engine, dice = make(own), random.Random(5)
        engine.streams.ensure(engine.names.main)
        wanted = []
        frames = []
        for number in range(3000):
            hit = dice.random() < 0.02 or 1200 < number < 1500
            frames.append(Frame(engine.names.ready("hit" if hit else "other", 0), str(number).encode()))
            if hit:
                wanted.append(number)
        assert None not in engine.link.requests(frames, 20)
        found = list(walk(engine, engine.names.main, engine.names.ready("hit", "*")))
        assert [int(each.data) for each in found] == wanted
        assert list(walk(engine, engine.names.main, engine.names.ready("nothing", "*"))) == []
        assert list(walk(engine, "no_stream", "x")) == []


def test_streams_of_an_older_server_learn_what_the_newer_one_can(make: Make) -> None:
    with NatsServer() as server:
        for stream, subjects_, more in (
                ("sb", ["sb.q.*.*", "sb.d.*.>"], {"retention": "workqueue"}),
                ("sb_state", ["sb.s.*.*", "sb.b.*.*"], {"max_msgs_per_subject": 1})):
            server.api(f"STREAM.CREATE.{stream}", {"name": stream, "subjects": subjects_, "max_consumers": 7, **more})
        engine, queue = make(server), name()
        engine.publish(queue, messages("a", delay=50))
        assert engine.inspector().stats(queue).delayed == 1
        table = engine.table("t")
        table.put("a", "1")
        assert table.delete(["a"]) == 1
        config = server.api("STREAM.INFO.sb")["config"]
        assert (config["allow_msg_schedules"], config["max_consumers"]) == (True, 7)


def test_the_bounds_of_dead_letters_are_those_of_who_buries_last(own: NatsServer, make: Make) -> None:
    queue = name()
    for body, age in (("old", 3600), ("new", 60)):
        engine = make(own, dead_letter_max_age=age)
        engine.publish(queue, messages(body))
        consumer = engine.consume([queue])
        consumer.dead_letter(*drain(consumer, 1), "because")
        until(lambda body=body, engine=engine: body in bodies(engine.inspector().dead(queue)))
        assert own.api("STREAM.INFO.sb_dead")["config"]["max_age"] == age * 10**9
        consumer.close()
    assert bodies(make(own).inspector().dead(queue)) == ["old", "new"]


def test_a_server_that_refuses_to_change_a_stream_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    users = """authorization { users: [
        { user: all, password: a }
        { user: some, password: s, permissions: { publish: { deny: ["$JS.API.STREAM.UPDATE.>"] } } } ] }"""
    with NatsServer(config=users) as server, \
            closing(connect(server.url(user="all", password="a"))) as first, \
            closing(connect(server.url(user="some", password="s"), dead_letter_max_age=3600.0)) as second:
        queue = name()
        for engine, body in ((first, "one"), (second, "two")):
            engine.publish(queue, messages(body, "back"))
            consumer = engine.consume([queue])
            dead, back = drain(consumer, 2)
            consumer.dead_letter(dead, "because")
            consumer.nack(back)
            again = drain(consumer, 1)
            assert bodies(again) == ["back"]
            acked(consumer, again)
            consumer.close()
        until(lambda: bodies(first.inspector().dead(queue)) == ["one", "two"])
    assert "stays as it was made" in caplog.text


def test_what_the_server_gives_up_is_logged(nats_servers: Callable[[str], NatsServer], prefix: str,
                                            caplog: pytest.LogCaptureFixture) -> None:
    server = nats_servers("nats")
    engine = JetStreamEngine.from_url(server.url(), prefix=prefix)
    with caplog.at_level(logging.INFO):
        consumer = engine.consume(["q"])
        engine.publish("q", [Message(b"a"), Message(b"b")])
        consumer.dead_letter(consumer.receive(5)[0], "why")
        until(lambda: "was terminated" in caplog.text)
        config = server.api(f"CONSUMER.INFO.{prefix}.q_0")["config"] | {"max_deliver": 1}
        body = {"stream_name": prefix, "config": config}
        assert "error" not in server.api(f"CONSUMER.DURABLE.CREATE.{prefix}.q_0", body)
        consumer.nack(consumer.receive(5)[0])
        until(lambda: consumer.receive(0.1) == [] and "max_deliver" in caplog.text)
    engine.close()
