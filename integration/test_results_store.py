"""The store of results on real nats-servers of every version that is here."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streambroker.errors import AuthenticationError, MessageTooLarge, StoreConnectionError, StoreError
from streambroker.results import Conflict, ResultStore
from streambroker.results.gathering import Gathering, Turn
from streambroker.results.sets import ResultSet
from streambroker.testing.faults import Proxy
from streambroker.testing.natsserver import NatsCluster, NatsServer
from streambroker.testing.servers import wait_until

Open = Callable[..., ResultStore]


@pytest.fixture
def server(every_nats_kind: str, nats_servers: Callable[[str], NatsServer]) -> NatsServer:
    return nats_servers(every_nats_kind)


@pytest.fixture
def open_store(prefix: str) -> Iterator[Open]:
    """`open_store(url, **options)` with this test's prefix."""
    stores: list[ResultStore] = []

    def start(url: str, **options: object) -> ResultStore:
        stores.append(ResultStore(url, **{"prefix": prefix, "expires": 60, **options}))
        return stores[-1]

    yield start
    for store in stores:
        store.close()


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """A server to be killed."""
    with NatsServer() as server:
        yield server


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def messages(server: NatsServer, store: ResultStore) -> int:
    return int(server.api(f"STREAM.INFO.{store.stream.name}")["state"]["messages"])


def test_values_are_put_read_replaced_and_deleted(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    assert store.get("a") is None
    first = store.put("a", b"one")
    second = store.put("a", b"\0two\xff")
    store.put("b.c *>", b"")
    assert second > first
    assert [found and found.value for found in store.get_many(["a", "none", "b.c *>"])] == [b"\0two\xff", None, b""]
    store.delete(["a", "none"])
    assert store.get("a") is None
    assert messages(server, store) == 1


def test_a_put_that_expects_another_value_is_refused(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    first = store.put("a", b"one", expected=0)
    with pytest.raises(Conflict):
        store.put("a", b"two", expected=0)
    store.put("a", b"three", expected=first)
    with pytest.raises(Conflict):
        store.put("a", b"four", expected=first)
    found = store.get("a")
    assert found
    assert found.value == b"three"


def test_no_concurrent_change_is_lost(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())

    def count() -> None:
        for _ in range(15):
            store.update("n", lambda old: b"%d" % (int(old or 0) + 1))

    for thread in [in_thread(count) for _ in range(4)]:
        thread.join()
    found = store.get("n")
    assert found
    assert found.value == b"60"


def test_a_waiter_gets_what_is_there_and_what_comes(server: NatsServer, open_store: Open) -> None:
    store, other = open_store(server.url()), open_store(server.url())
    store.put("early", b"1")
    found = other.wait("early", 5)
    assert found
    assert found.value == b"1"
    assert other.wait("never", 0.2) is None
    got: list[bytes] = []
    waiting = [in_thread(lambda key=key: got.append((other.wait(key, 20) or store.wait(key)).value))
               for key in ("late", "late", "later")]
    wait_until(lambda: len(other._watcher._keys) == 2, 5, "both keys are watched")
    store.put("late", b"2")
    store.put("later", b"3")
    for thread in waiting:
        thread.join(20)
    assert sorted(got) == [b"2", b"2", b"3"]


def test_a_waiter_hears_nothing_of_a_put_that_was_refused(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    first = store.put("a", b"right")
    with store.watch() as watch:
        watch.add({"a": 0})
        assert [value.value for _, value in watch.take(5)] == [b"right"]
        with pytest.raises(Conflict):
            store.put("a", b"wrong", expected=first + 10)
        store.put("a", b"next", expected=first)
        assert [value.value for _, value in watch.take(5)] == [b"next"]


def test_thousands_of_keys_are_watched_and_let_go(nats_servers: Callable[[str], NatsServer],
                                                  open_store: Open) -> None:
    server = nats_servers("nats")
    store = open_store(server.url(), client_name="watches-many")
    keys = [f"k{number}" for number in range(2000)]
    for key in keys[:1000]:
        store.put(key, b"before")

    def subscriptions() -> int:
        return sum(client["subscriptions"] for client in server.look("connz?limit=10000")["connections"]
                   if client.get("name") == "watches-many")

    base = subscriptions()
    with store.watch() as watch:
        watch.add(dict.fromkeys(keys, 0))
        got: dict[str, bytes] = {}
        wait_until(lambda: got.update((key, value.value) for key, value in watch.take(1)) or len(got) == 1000, 20,
                   "what is there is told")
        wait_until(lambda: subscriptions() == base + 2000, 10, "each key is subscribed to")
        for key in keys[1000:]:
            store.put(key, b"after")
        wait_until(lambda: got.update((key, value.value) for key, value in watch.take(1)) or len(got) == 2000, 20,
                   "what comes is told")
        watch.discard(keys[:1500])
        wait_until(lambda: subscriptions() == base + 500, 10, "some are let go")
    wait_until(lambda: subscriptions() == base, 10, "all are let go")


def test_values_expire_each_at_its_time(nats_servers: Callable[[str], NatsServer], open_store: Open) -> None:
    server = nats_servers("nats")
    store = open_store(server.url(), expires=1.0, max_age=0.0)
    store.put("short", b"1")
    store.put("long", b"1", expires=60)
    store.put("ever", b"1", expires=0)
    wait_until(lambda: store.get("short") is None, 6, "the first is gone")
    assert store.get("long")
    assert store.get("ever")


def test_values_expire_together_on_old_servers(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url(), expires=1.0)
    store.put("a", b"1")
    assert store.get("a")
    wait_until(lambda: messages(server, store) == 0, 6, "it is gone")


def test_a_longer_age_is_asked_for_later(server: NatsServer, open_store: Open) -> None:
    open_store(server.url(), expires=1.0).put("a", b"1")
    store = open_store(server.url(), expires=300.0)
    store.put("b", b"1")
    config = server.api(f"STREAM.INFO.{store.stream.name}")["config"]
    assert config["max_age"] == 300 * 10**9
    time.sleep(2)
    assert store.get("b")


def test_a_set_keeps_the_first_value_of_each_member(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    numbers = ResultSet(store, "numbers")
    sequences = [numbers.add(f"{number:02}", b"%d" % number) for number in (3, 1, 2)]
    assert 0 < sequences[0] < sequences[1] < sequences[2]
    assert numbers.add("01", b"other") == 0
    assert numbers.values() == [b"1", b"2", b"3"]
    assert numbers.count() == 3
    numbers.discard("02")
    assert numbers.values() == [b"1", b"3"]
    numbers.clear()
    assert numbers.values() == []
    assert messages(server, store) == 0


def test_one_part_alone_gets_the_turn(server: NatsServer, open_store: Open) -> None:
    stores = [open_store(server.url()) for _ in range(3)]
    for round_ in range(5):
        turns: list[Turn] = []
        name = f"round{round_}"
        Gathering(stores[0], name, 60).begin(12)

        def arrive(number: int, name: str = name, turns: list[Turn] = turns) -> None:
            turn = Gathering(stores[number % 3], name, 60).arrive(f"{number:02}", b"%d" % number)
            if turn is not None:
                turns.append(turn)

        for thread in [in_thread(lambda number=number: arrive(number)) for number in range(12)]:
            thread.join()
        [turn] = turns
        gathering = Gathering(stores[0], name, 60)
        assert gathering.values() == [b"%d" % number for number in range(12)]
        gathering.finish(turn)
        assert gathering.arrive(turn.part, b"again") is None
        assert gathering.values() == []


def test_many_parts_are_counted_few_times(nats_servers: Callable[[str], NatsServer], open_store: Open) -> None:
    server = nats_servers("nats")
    store = open_store(server.url())
    gathering = Gathering(store, "g", 60)
    assert all(gathering.arrive(f"{number:04}", b"") is None for number in range(100))
    gathering.begin(1000)

    def requests() -> int:
        return int(server.look("varz")["jetstream"]["stats"]["api"]["total"])

    before = requests()
    turns = []
    for number in range(100, 1000):
        turns.append(gathering.arrive(f"{number:04}", b""))
        if number % 2:
            store.put("other traffic", b"")
    assert turns.count(None) == 899
    assert turns[-1] is not None
    assert requests() - before < 30


def test_the_turn_goes_to_the_same_part_again_and_to_no_other(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    gathering = Gathering(store, "g", 60)
    assert gathering.arrive("1", b"") is None
    gathering.enlarge()
    gathering.begin(1)
    dead = gathering.arrive("2", b"")
    assert dead
    assert gathering.arrive("1", b"") is None
    alive = gathering.arrive("2", b"")
    assert alive
    assert gathering.renew(dead) is None
    renewed = gathering.renew(alive)
    assert renewed
    gathering.finish(alive)  # too old: no effect
    assert gathering.values() == [b"", b""]
    gathering.finish(renewed)
    assert gathering.values() == []


def test_two_prefixes_never_meet(server: NatsServer, open_store: Open, prefix: str) -> None:
    one, two = open_store(server.url()), open_store(server.url(), prefix=f"{prefix}.r")
    one.put("a", b"1")
    assert two.get("a") is None
    assert two.wait("a", 0.2) is None
    two.put("a", b"2")
    two.delete(["a"])
    assert one.get("a")


def test_a_value_over_the_servers_limit_is_refused_before_it_is_sent(own: NatsServer, open_store: Open) -> None:
    store = open_store(own.url())
    with pytest.raises(MessageTooLarge, match=r"2000\d\d\d bytes.*1048576"):
        store.put("a", b"x" * 2_000_000)
    store.put("a", b"1")
    assert store.link.epoch == 1


def test_a_put_and_a_get_outlast_a_restart(own: NatsServer, open_store: Open) -> None:
    store = open_store(own.url())
    store.put("a", b"1")
    for hard in (True, False):
        own.kill() if hard else own.stop()
        began = time.monotonic()
        with pytest.raises(StoreConnectionError):
            store.get("a", patience=0)
        assert time.monotonic() - began < 3
        putting = in_thread(lambda: store.put("a", b"2"))
        own.start()
        putting.join(20)
        found = store.get("a")
        assert found
        assert found.value == b"2"
        assert messages(own, store) == 1


def test_a_waiter_outlasts_restarts(own: NatsServer, open_store: Open) -> None:
    store, other = open_store(own.url()), open_store(own.url())
    other.put("else", b"")
    got: list[object] = []
    waiting = in_thread(lambda: got.append(store.wait("a", 40)))
    wait_until(lambda: store._watcher._keys, 5, "it is watched")
    own.restart(hard=True)
    own.restart()
    other.put("a", b"1")
    waiting.join(40)
    assert [found.value for found in got] == [b"1"]


def test_a_result_that_was_put_while_the_waiter_was_cut_off(own: NatsServer, open_store: Open) -> None:
    """The waiter hears of it by reading after the reconnect."""
    store = open_store(own.url())
    store.put("else", b"")
    with Proxy(own.port) as proxy:
        cut_off = open_store(own.url(port=proxy.port))
        got: list[object] = []
        waiting = in_thread(lambda: got.append(cut_off.wait("a", 40)))
        wait_until(lambda: cut_off._watcher._keys and cut_off.link.connected, 5, "it is watched")
        proxy.refuse()
        proxy.reset()
        wait_until(lambda: not cut_off.link.connected, 10, "it is cut off")
        store.put("a", b"1")
        proxy.refuse(False)
        waiting.join(40)
    assert [found.value for found in got] == [b"1"]


def test_a_put_whose_answer_is_lost_is_no_conflict_with_itself(server: NatsServer, open_store: Open) -> None:
    with Proxy(server.port) as proxy:
        store = open_store(server.url(port=proxy.port))
        store.put("else", b"")
        proxy.drop_reply(b".r.a ")
        sequence = store.put("a", b"1", expected=0)
        proxy.wait_dropped()
        found = store.get("a")
        assert found
        assert (found.value, found.sequence) == (b"1", sequence)
        assert messages(server, store) == 2


def test_a_stream_that_was_deleted_is_made_again(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    store.put("a", b"1")
    with store.watch() as watch:
        watch.add({"a": 0, "b": 0})
        assert len(watch.take(5)) == 1
        server.api(f"STREAM.DELETE.{store.stream.name}")
        assert store.get("a") is None
        server.api(f"STREAM.DELETE.{store.stream.name}")
        store.put("b", b"2")
        assert [(key, value.value) for key, value in watch.take(5)] == [("b", b"2")]
        server.api(f"STREAM.DELETE.{store.stream.name}")
        assert store.update("c", lambda old: old or b"3")
    assert messages(server, store) == 1


def test_a_forked_child_has_a_connection_of_its_own(server: NatsServer, open_store: Open) -> None:
    store = open_store(server.url())
    store.put("parent", b"1")
    child = os.fork()
    if not child:
        code = 1
        try:
            store.put("child", b"2")
            code = 0 if store.get("parent") and store.wait("answer", 20) else 2
        finally:
            os._exit(code)
    found = store.wait("child", 20)
    assert found
    store.put("answer", b"")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("parent")
    assert store.link.epoch == 1


def test_a_refused_login_is_told_at_once_to_all(open_store: Open) -> None:
    with NatsServer(users={"u": "right"}) as server:
        store = open_store(server.url(user="u", password="wr0ng"))
        for use in (lambda: store.get("a"), lambda: store.put("a", b""), lambda: store.wait("a", 20)):
            began = time.monotonic()
            with pytest.raises(AuthenticationError) as caught:
                use()
            assert time.monotonic() - began < 5
            assert "wr0ng" not in str(caught.value)


@pytest.fixture
def guarded(prefix: str) -> Iterator[NatsServer]:
    """A server with the users of README: one that stores and waits, one that only waits, one that hears nothing."""
    asks = [f"$JS.API.DIRECT.GET.{prefix}_results.>", "$JS.API.INFO",
            *(f"$JS.API.STREAM.{verb}.{prefix}_results" for verb in ("INFO", "MSG.GET"))]
    writes = [f"{prefix}.r.*", f"{prefix}.c.*.*",
              *(f"$JS.API.STREAM.{verb}.{prefix}_results" for verb in ("CREATE", "UPDATE", "PURGE"))]

    def user(name: str, publish: list[str], subscribe: list[str]) -> str:
        return (f"{{user: {name}, password: p, permissions: {{publish: {json.dumps(publish)}, "
                f"subscribe: {json.dumps(['_INBOX.>', *subscribe])}}}}}")

    news = [f"{prefix}.a.*"]
    users = ", ".join([user("writer", asks + writes, news), user("reader", asks, news), user("deaf", asks, [])])
    with NatsServer(config=f"authorization {{ users: [{users}] }}") as server:
        yield server


def test_few_permissions_are_enough(guarded: NatsServer, open_store: Open) -> None:
    store = open_store(guarded.url(user="writer", password="p"))
    store.put("a", b"1")
    assert store.update("a", lambda old: b"2")
    gathering = Gathering(store, "g", 60)
    gathering.begin(1)
    turn = gathering.arrive("1", b"")
    assert turn
    assert gathering.values() == [b""]
    gathering.finish(turn)
    reader = open_store(guarded.url(user="reader", password="p"))
    assert reader.get("a")
    got: list[object] = []
    waiting = in_thread(lambda: got.append(reader.wait("b", 20)))
    store.put("b", b"2")
    waiting.join(20)
    assert [found.value for found in got] == [b"2"]
    store.delete(["a"])
    assert reader.get("a") is None
    longer = open_store(guarded.url(user="writer", password="p"), expires=600.0)
    longer.put("a", b"1")


def test_a_missing_permission_is_told(guarded: NatsServer, open_store: Open) -> None:
    open_store(guarded.url(user="writer", password="p")).put("a", b"1")
    reader = open_store(guarded.url(user="reader", password="p"))
    with pytest.raises(StoreError, match=r"(?i)permission"):
        reader.put("a", b"2")
    deaf = open_store(guarded.url(user="deaf", password="p"))
    assert deaf.get("a")
    with pytest.raises(StoreError, match=r"may not subscribe"):
        deaf.wait("b", 20)


def test_an_election_loses_nothing(open_store: Open) -> None:
    """Three copies: the leader is killed while one waits; what is put afterwards, and before, is there."""
    with NatsCluster() as cluster:
        store = open_store(cluster.url(), replicas=3, publish_timeout=30.0)
        store.put("before", b"1")
        leader = cluster.leader(store.stream.name)
        got: list[object] = []
        waiting = in_thread(lambda: got.append(store.wait("after", 60)))
        wait_until(lambda: store._watcher._keys, 5, "it is watched")
        leader.kill()
        store.put("after", b"2")
        waiting.join(60)
        assert [found.value for found in got] == [b"2"]
        found = store.get("before")
        assert found
        assert found.value == b"1"
