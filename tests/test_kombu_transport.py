"""Connections: the event loop, lost connections, forks, shared engines, errors, batches."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.asynchronous import Hub
from kombu.exceptions import OperationalError

from streambroker.errors import AuthenticationError, ConfigurationError, MessageTooLarge
from streambroker.kombu import failures
from streambroker.kombu.transport import MemoryTransport, RedisStreamsTransport
from streambroker.message import Message
from streambroker.testing.servers import wait_until
from tests.kombu_rig import Broker, drain, engine_of


def publish(channel: Any, body: Any = "x", **options: Any) -> None:
    Producer(channel).publish(body, routing_key="jobs", serializer="json", **options)


def in_flight(connection: Connection, count: int) -> None:
    """Waits until that many deliveries are unsettled: settlements may take some milliseconds to the store."""
    inspector = engine_of(connection).inspector()
    wait_until(lambda: inspector.stats("jobs").in_flight == count, 5, f"{count} in flight")


def ready(connection: Connection, count: int) -> None:
    wait_until(lambda: engine_of(connection).ready("jobs") == count, 5, f"{count} ready")


# ------------------------------------------------------------ in Kombu's event loop
class Loop:
    def __init__(self) -> None:
        self.hub = Hub()

    def register(self, connection: Connection) -> None:
        connection.transport.register_with_event_loop(connection.connection, self.hub)

    def run(self, until: Any, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline, "the loop did not get there"
            self.hub.run_once()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.hub.close()


def test_messages_arrive_and_acks_leave_within_a_turn(broker: Broker, loop: Loop) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    loop.register(connection)
    got: list[Any] = []
    acked: list[Any] = []

    def on_message(body: Any, message: Any) -> None:
        got.append(body)
        loop.hub.call_soon(lambda: (message.ack(), acked.append(body)))

    Consumer(channel, [Queue("jobs")], callbacks=[on_message], prefetch_count=2).consume()
    for number in range(20):
        publish(other.channel(), number)
    loop.run(lambda: len(acked) == 20)
    assert got == list(range(20))
    in_flight(connection, 0)


def test_what_arrives_while_the_loop_polls_wakes_it(broker: Broker, loop: Loop) -> None:
    connection, other = broker.open(), broker.second()
    loop.register(connection)
    arrived: list[float] = []
    Consumer(connection.channel(), [Queue("jobs")], no_ack=True,
             callbacks=[lambda body, message: arrived.append(time.monotonic() - body)]).consume()
    sender = threading.Timer(0.1, lambda: publish(other.channel(), time.monotonic()))
    sender.start()
    loop.run(lambda: arrived)
    sender.join()
    assert arrived[0] < 0.5


def test_callbacks_that_are_scheduled_while_handing_over_do_not_wait_for_the_poll(broker: Broker, loop: Loop) -> None:
    """A solo pool acknowledges like that: it must not cost a second a task."""
    connection = broker.open()
    channel = connection.channel()
    for number in range(5):
        publish(channel, number)
    loop.register(connection)
    done: list[float] = []

    def on_done(message: Any) -> None:
        message.ack()
        done.append(time.monotonic())

    Consumer(channel, [Queue("jobs")], prefetch_count=1,
             callbacks=[lambda body, message: loop.hub.call_soon(on_done, message)]).consume()
    started = time.monotonic()
    loop.run(lambda: len(done) == 5)
    assert done[-1] - started < 0.5


def test_a_long_callback_gives_the_loop_its_turn(broker: Broker, loop: Loop) -> None:
    """Else a worker with a solo pool would run all that it fetched before it sees that it should stop."""
    connection = broker.open()
    channel = connection.channel()
    for number in range(4):
        publish(channel, number)
    loop.register(connection)
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], prefetch_count=4,
             callbacks=[lambda body, message: (got.append(body), time.sleep(0.05))]).consume()
    turns: list[int] = []
    loop.hub.on_tick.add(lambda: turns.append(len(got)))
    loop.run(lambda: len(got) == 4)
    assert {1, 2, 3} & set(turns)


def test_nothing_is_left_in_the_loop_after_the_connection(broker: Broker, loop: Loop) -> None:
    hub = loop.hub
    for _ in range(3):
        connection = broker.open()
        loop.register(connection)
        Consumer(connection.channel(), [Queue("jobs")], callbacks=[lambda body, message: None]).consume()
        hub.run_once()
        connection.release()
    assert not hub.on_tick
    assert not hub.readers


def test_acks_of_other_threads_free_credit_while_a_drain_waits(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], prefetch_count=1,
             callbacks=[lambda body, message: got.append(message)]).consume()
    publish(channel, 1)
    publish(channel, 2)
    drain(connection, lambda: got)
    threading.Timer(0.05, got[0].ack).start()
    connection.drain_events()
    assert len(got) == 2


def test_two_threads_may_drain_one_connection(broker: Broker) -> None:
    connection = broker.open()
    got: list[Any] = []
    Consumer(connection.channel(), [Queue("jobs")], callbacks=[lambda body, message: got.append(body)],
             no_ack=True).consume()
    threads = [threading.Thread(target=lambda: drain_until_quiet(connection)) for _ in range(2)]
    for number in range(50):
        publish(connection.channel(), number)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(50))


def drain_until_quiet(connection: Connection) -> None:
    try:
        while True:
            connection.drain_events(timeout=0.2)
    except TimeoutError:
        pass


# ------------------------------------------------------------ lost connections
def test_a_lost_connection_keeps_what_runs_and_hands_the_rest_back(broker: Broker) -> None:
    """Celery gives the connection up, drops what only waited, and acknowledges later on the closed channel."""
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    for number in range(4):
        publish(channel, number)
    got: list[Any] = []
    consumer = Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)])
    consumer.consume()
    drain(connection, lambda: len(got) == 4)
    shared = connection.transport.shared
    connection.collect()
    in_flight(other, 4)
    running = got[:2]
    del got[2:]
    gc.collect()
    assert connection.connect() is not None
    connection.transport.pump()
    in_flight(other, 2)
    ready(other, 2)
    assert connection.transport.shared is shared
    for message in running:
        message.ack()
    in_flight(other, 0)
    assert not shared.keeping
    again = [connection.channel().basic_get("jobs") for _ in range(2)]
    assert [message.decode() for message in again] == [2, 3]
    assert {message.headers["x-delivery-count"] for message in again} == {1}


def test_a_task_that_is_cancelled_after_the_loss_goes_back(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    publish(channel)
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)]).consume()
    drain(connection, lambda: got)
    connection.collect()
    connection.connect()
    in_flight(other, 1)
    got.clear()
    gc.collect()
    connection.transport.pump()
    ready(other, 1)


def test_a_message_that_nobody_keeps_stays_out_while_the_channel_is_open(broker: Broker) -> None:
    """As with AMQP: a consumer may remember tags only."""
    connection = broker.open()
    channel = connection.channel()
    publish(channel)
    tags: list[str] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: tags.append(message.delivery_tag)]).consume()
    drain(connection, lambda: tags)
    gc.collect()
    connection.transport.pump()
    in_flight(connection, 1)
    channel.basic_ack(tags[0])
    in_flight(connection, 0)


def test_closing_hands_back_at_once(broker: Broker) -> None:
    connection, other = broker.open(), broker.second()
    channel = connection.channel()
    publish(channel)
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)]).consume()
    drain(connection, lambda: got)
    connection.release()
    connection.release()
    ready(other, 1)
    got[0].ack()
    ready(other, 1)


def test_a_connection_that_is_dropped_without_a_word_keeps_nothing(broker: Broker) -> None:
    other = broker.second()
    publish(other.channel())
    connection = Connection(broker.url, transport_options={**broker.options, "client_name": "dropped"})
    got: list[Any] = []
    Consumer(connection.channel(), [Queue("jobs")], callbacks=[lambda body, message: got.append(message)]).consume()
    drain(connection, lambda: got)
    del connection
    got.clear()
    gc.collect()
    # the engine is closed by its next use, of whatever kind
    again = Connection(broker.url, transport_options={**broker.options, "client_name": "dropped"})
    again.connect()
    ready(other, 1)
    again.release()


def test_errors_are_sorted_for_kombu() -> None:
    for transport in (MemoryTransport, RedisStreamsTransport):
        assert issubclass(OSError, transport.connection_errors)
        assert issubclass(failures.LoginRefused, transport.connection_errors)
        assert not issubclass(failures.LoginRefused, transport.recoverable_connection_errors)
        assert not issubclass(MessageTooLarge, transport.recoverable_channel_errors)
        assert issubclass(MessageTooLarge, transport.channel_errors)
    told = failures.LoginRefused.of(AuthenticationError("wrong password"))
    assert str(told) == "wrong password"


def test_an_oversized_message_is_refused_to_its_sender(broker: Broker) -> None:
    connection = broker.open(max_message_size=1000)
    producer = Producer(connection.channel())
    with pytest.raises(MessageTooLarge):
        producer.publish("x" * 2000, routing_key="jobs", retry=True, retry_policy={"max_retries": 3})
    publish(connection.channel())
    ready(connection, 1)


# ------------------------------------------------------------ one engine a process
def test_connections_share_an_engine_and_the_last_one_closes_it(broker: Broker) -> None:
    one, two = broker.open(), broker.open()
    engine = engine_of(one)
    assert engine_of(two) is engine
    assert engine_of(broker.second()) is not engine
    one.release()
    engine.publish("jobs", [Message(b"x")])
    two.release()
    with pytest.raises(ConnectionError):
        engine.publish("jobs", [Message(b"x")])
    three = broker.open()
    assert engine_of(three) is not engine


def test_retry_keys_that_kombu_adds_make_no_other_engine(broker: Broker) -> None:
    connection = broker.open()
    Producer(connection.channel()).publish("x", routing_key="jobs", retry=True,
                                           retry_policy={"max_retries": 3, "interval_start": 0})
    connection.transport_options["max_retries"] = 3  # done by the publish since Kombu 5.5
    clone = connection.clone()
    clone.connect()
    assert engine_of(clone) is engine_of(connection)
    clone.release()


def test_making_a_transport_does_no_io() -> None:
    connection = Connection("redis-streams://127.0.0.1:1/0")
    transport = connection.transport
    assert connection.as_uri().endswith("127.0.0.1:1/0")
    assert transport.driver_type == "redis"
    assert transport.driver_name != "redis"
    assert not connection.connected
    assert connection.supports_exchange_type("topic")
    assert not connection.supports_exchange_type("headers")
    assert connection.transport.implements.asynchronous
    pickle.dumps(connection.info())


def test_unknown_options_are_told_once_and_bad_values_refused(broker: Broker, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("streambroker.kombu.conninfo._warned", set())
    for _ in range(2):
        broker.open(visibility_timeoutt=3, fanout_prefix=True, region="eu")
    assert caplog.text.count("did you mean 'visibility_timeout'") == 1
    for options in ({"visibility_timeout": "long"}, {"priority_order": "up"}, {"revoke_waiting": "no"},
                    {"deadletter_queue": 5}, {"auto_delete_expires": -1}):
        with pytest.raises(ConfigurationError):
            broker.open(**options)


# ------------------------------------------------------------ forks
def in_child(action: Any) -> None:
    """Run `action` in a forked child; it must return and leave nothing behind."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  it must not get into the parent's tests
            os.write(2, f"child: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_child_leaves_the_parents_deliveries_alone(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    publish(channel)
    got: list[Any] = []
    Consumer(channel, [Queue("jobs")], callbacks=[lambda body, message: got.append(message)]).consume()
    drain(connection, lambda: got)

    def child() -> None:
        got[0].ack()
        connection.collect()
        channel.close()
        connection.release()

    in_child(child)
    in_flight(connection, 1)
    got[0].ack()
    publish(channel, "next")
    drain(connection, lambda: len(got) == 2)


def test_a_child_can_use_what_it_inherited_for_publishing(broker: Broker) -> None:
    """As a server does that loads the application before it forks its workers."""
    connection = broker.open()
    producer = Producer(connection.channel(), Exchange("e"))
    queue = Queue("jobs", Exchange("e"), routing_key="jobs")
    producer.publish("parent", routing_key="jobs", declare=[queue])

    def child() -> None:
        # a memory store ends with its process: the child's is empty, and its own
        assert not connection.connected
        queue(producer.channel).declare()
        before = engine_of(connection).ready("jobs")
        producer.publish("child", routing_key="jobs")
        assert engine_of(connection).ready("jobs") == before + 1
        connection.connect()
        while connection.channel().basic_get("jobs", no_ack=True).decode() != "child":
            pass

    in_child(child)
    engine_of(connection).inspector().purge("jobs")
    producer.publish("parent again", routing_key="jobs")
    ready(connection, 1)


# ------------------------------------------------------------ batches
def test_batch(broker: Broker) -> None:
    connection = broker.open()
    channel = connection.channel()
    exchange = Exchange("f", "fanout")
    for name in ("jobs", "copies"):
        Queue(name, exchange)(channel).declare()
    producer = Producer(channel, exchange, serializer="json")
    if not hasattr(producer, "batch"):
        pytest.skip("Kombu before 5.7 has no batches")
    assert producer.supports_batch_publish
    with producer.batch(max_size=8):
        for number in range(3):
            producer.publish(number)
        ready(connection, 0)
        for number in range(3, 5):
            producer.publish(number)
        ready(connection, 4)
    assert [engine_of(connection).ready(name) for name in ("jobs", "copies")] == [5, 5]
    with pytest.raises(ZeroDivisionError), producer.batch():
        producer.publish(9)
        raise ZeroDivisionError
    ready(connection, 5)


def test_a_failed_batch_says_so_and_ends(broker: Broker) -> None:
    from streambroker.kombu.batch import BatchPublishError, PublishBatch

    connection = broker.open(max_message_size=1000)
    channel = connection.channel()
    batch = PublishBatch(channel, 10)
    batch.publish(channel.prepare_message(b"x" * 2000), routing_key="jobs")
    with pytest.raises(BatchPublishError):
        batch.flush()
    with pytest.raises(BatchPublishError, match="any more"):
        batch.publish(channel.prepare_message(b"x"), routing_key="jobs")
    batch.close()
    assert issubclass(BatchPublishError, OperationalError) or BatchPublishError.__name__ == "BatchPublishError"


def test_management_lists_bindings(broker: Broker) -> None:
    connection = broker.open()
    Queue("jobs", Exchange("e"), routing_key="k")(connection.channel()).declare()
    assert connection.get_manager().get_bindings() == [{"destination": "jobs", "source": "e", "routing_key": "k"}]


def test_messages_of_others_are_readable(broker: Broker) -> None:
    """A message that came from no Kombu: no head to speak of."""
    connection = broker.open()
    engine_of(connection).publish("jobs", [Message(b"raw")])
    message = connection.channel().basic_get("jobs")
    assert message.body == b"raw"
    assert message.content_type is None
    assert message.delivery_info["routing_key"] == "jobs"
