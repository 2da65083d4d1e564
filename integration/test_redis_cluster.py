"""Celery and Dramatiq on a Redis Cluster: queues in several slots, masters that die, slots that move."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import redis
from kombu import Connection
from redis.crc import key_slot

from integration.load import Load
from integration.rig import CeleryRig
from integration.test_acl import PASSWORD, USER, denials, documented_rule
from integration.test_celery_death import seconds_to_restart
from integration.worker import ROOT
from streambroker.connection import connect
from streambroker.dramatiq import RedisStreamsBroker
from streambroker.engine import Consumer
from streambroker.errors import StoreConnectionError
from streambroker.message import Delivery, Message
from streambroker.testing.rediscluster import RedisCluster
from streambroker.testing.servers import RedisServer, wait_until
from streambroker.testing.tls import Authority, TlsFront

#: a master counts as dead after this, and its replica follows it within as much again and an election
NODE_TIMEOUT = 1.0
#: after the death of a master so long (seconds) a message may have come for the second time
EXPLAINED = 3 * NODE_TIMEOUT + 3


@pytest.fixture(scope="module")
def shared(kind: str) -> Iterator[RedisCluster]:
    """Three masters with a replica each, for tests that leave it as it was."""
    with RedisCluster(kind, replicas=1, node_timeout=NODE_TIMEOUT) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: RedisCluster) -> Iterator[RedisCluster]:
    yield shared
    for server in shared.servers:
        if not server.process.alive:
            server.start()
    shared.wait_well()


def queues_on(cluster: RedisCluster) -> list[str]:
    """A queue on each master."""
    found: dict[int, str] = {}
    for number in range(1000):
        found.setdefault(cluster.master_of(f"{{q{number}}}").port, f"q{number}")
        if len(found) == 3:
            return list(found.values())
    raise AssertionError(f"not three masters: {found}")


def slot_of(queue: str) -> int:
    return int(key_slot(f"{{{queue}}}".encode()))


# ------------------------------------------------------------------ the frameworks
def test_a_day_of_a_worker_of_three_queues(cluster: RedisCluster, celery: CeleryRig) -> None:
    one, two, three = queues = queues_on(cluster)
    celery.use(cluster.url(), queues=queues, backend="rpc://")
    ledger, app = celery.ledger, celery.app
    for queue in queues:
        celery.send_all("work", [f"{queue} waits"], queue=queue)
    for number in range(6):
        celery.send("work", f"{number % 2}-{number}", queue=two, priority=9 * (number % 2))
    with app.connection_for_write() as connection:
        counts = {queue: connection.channel().queue_declare(queue, passive=True).message_count for queue in queues}
    assert counts == {one: 1, two: 7, three: 1}
    worker = celery.worker(concurrency=1)
    ledger.wait("end", 9, 20)
    assert [line.id[0] for line in ledger.lines("start") if "-" in line.id] == ["0"] * 3 + ["1"] * 3

    assert app.tasks["add"].apply_async((1, 2), queue=three).get(timeout=10) == 3
    assert len(app.control.ping(timeout=5, limit=1)) == 1
    [active] = app.control.inspect(timeout=5, limit=1).active_queues().values()
    assert {each["name"] for each in active} == set(queues)
    for queue in queues:
        celery.send_all("work", [f"{queue} {number}" for number in range(20)], queue=queue)
        celery.send("work", f"{queue} later", countdown=0.7, queue=queue)
        celery.send("retrying", f"{queue} again", 1, 0.3, queue=queue)
        celery.send("rejecting", f"{queue} dead", queue=queue)
        ledger.given_up(f"{queue} dead")
    ledger.wait("end", 9 + 3 * 22, 30)
    verdict = ledger.verdict()
    assert not (verdict.early or verdict.doubled or verdict.lost)
    for queue in queues:
        celery.wait_stats(queue, dead=1, ready=0, delayed=0, in_flight=0)
    listed = celery.cli("queues")
    assert {row["queue"] for row in listed if row["dead"] == 1} >= set(queues)
    [dead] = celery.engine.inspector().dead(one)
    assert celery.engine.inspector().replay(one, [dead.id]) == 1
    celery.wait_stats(one, dead=1)
    app.control.cancel_consumer(three, reply=True, timeout=5, limit=1)
    celery.send("work", "nobody's", queue=three)
    app.control.add_consumer(three, reply=True, timeout=5, limit=1)
    ledger.wait_ids("end", ["nobody's"], 10)
    worker.stop()
    app.backend.result_consumer.stop()
    assert celery.engine.delete(three) == 0


def test_what_a_killed_worker_held_on_three_masters_comes_back(cluster: RedisCluster, celery: CeleryRig) -> None:
    queues = queues_on(cluster)
    celery.use(cluster.url(), queues=queues, conf={"worker_prefetch_multiplier": 4})
    victim = celery.worker("victim", concurrency=3, options=["--without-mingle"])
    for queue in queues:
        celery.send_all("hold", [f"{queue}-{number}" for number in range(4)], queue=queue)
    celery.ledger.wait("start", 3, 20)
    wait_until(lambda: sum(celery.stats(queue).in_flight for queue in queues) == 12, 10, "all is taken")
    celery.worker("survivor", pool="threads", concurrency=12, options=["--without-mingle"])
    killed = time.time()
    victim.kill()
    took = seconds_to_restart(celery.ledger, killed, 12, 20)
    celery.flag("release")
    celery.ledger.wait("end", 12, 10)
    assert celery.ledger.verdict().clean
    assert took[-1] < 5


def test_dramatiq_on_three_masters(cluster: RedisCluster, prefix: str) -> None:
    broker = RedisStreamsBroker(url=cluster.url(), prefix=prefix, middleware=[])
    queues, done = queues_on(cluster), set[str]()

    @dramatiq.actor(broker=broker, actor_name="note")
    def note(name: str) -> None:
        done.add(name)

    for queue in queues:
        broker.declare_queue(queue)
    worker = dramatiq.Worker(broker, worker_threads=2)
    worker.start()
    try:
        for queue in queues:
            for number in range(20):
                broker.enqueue(note.message_with_options(args=(f"{queue} {number}",)).copy(queue_name=queue),
                               delay=300 if number == 0 else None)
        wait_until(lambda: len(done) == 60, 20, "all is done")
        for queue in queues:
            broker.join(queue, timeout=5000)
    finally:
        worker.stop()
        broker.close()


def test_no_node_needs_to_be_the_first_one(cluster: RedisCluster, prefix: str) -> None:
    """Start nodes that are away cost nothing but a try."""
    hosts = cluster.url().partition("://")[2]
    engine = connect(f"cluster-streams://127.0.0.1:1;{hosts}", prefix=prefix)
    engine.publish("q", [Message(b"a")])
    engine.close()
    with Connection(f"cluster-streams://127.0.0.1:1;{hosts}", transport_options={"prefix": prefix}) as connection:
        assert connection.default_channel.queue_declare("q", passive=True).message_count == 1


def test_a_server_that_is_no_cluster_is_told(valkey: RedisServer) -> None:
    engine = connect(valkey.url("cluster-streams"), publish_timeout=0.1)
    with pytest.raises(StoreConnectionError, match="cluster support disabled"):
        engine.ping()
    engine.close()


def use_everything(url: str, queues: list[str], **options: Any) -> None:
    """Each queue: publish, take, give back, settle; a broadcast."""
    engine = connect(url, **options)
    consumer, subscription = engine.consume(queues), engine.subscribe()
    subscription.add("celeryev")
    for queue in queues:
        engine.publish(queue, [Message(b"now"), Message(b"dead"), Message(b"later", delay=0.2)])
    got: list[Delivery] = []
    wait_until(lambda: got.extend(consumer.receive(1.0, 3)) or _settled(consumer, got) == 3 * len(queues), 20, "all")
    consumer.receive(0, 0)
    engine.broadcast("celeryev", Message(b"heard"))
    assert [message.body for _, _, message in subscription.receive(5)] == [b"heard"]
    for queue in queues:
        wait_until(lambda queue=queue: engine.inspector().stats(queue).dead == 1, 5, "a dead letter")
        assert engine.inspector().dead_remove(queue, [each.id for each in engine.inspector().dead(queue)]) == 1
        assert engine.delete(queue) == 0
    engine.close()


def _settled(consumer: Consumer, got: list[Delivery]) -> int:
    for delivery in got:
        if delivery.message.body == b"dead":
            consumer.dead_letter(delivery, "as asked")
        else:
            consumer.ack(delivery)
    return len(got)


def test_the_documented_user_is_enough(kind: str) -> None:
    more = re.findall(r"On a cluster each node needs the user, with `([^`]+)`", (ROOT / "README.md").read_text())
    with RedisCluster(kind, aof=False) as cluster:
        for server in cluster.servers:
            cluster.ask(server, "ACL", "SETUSER", USER, "on", f">{PASSWORD}", *documented_rule(), *more[0].split())
        queues = queues_on(cluster)
        use_everything(cluster.url(user=USER, password=PASSWORD), queues)
        cluster.migrate(slot_of(queues[0]), next(server for server in cluster.masters()
                                                 if server is not cluster.master_of(slot_of(queues[0]))))
        use_everything(cluster.url(user=USER, password=PASSWORD), queues)
        assert [denials(server) for server in cluster.servers] == [[], [], []]


def test_nodes_behind_tls(kind: str, tmp_path: Path) -> None:
    """With the certificates verified, those of nodes that only the map names too."""
    authority = Authority(tmp_path)
    with ExitStack() as stack:
        def front(port: int) -> int:
            return stack.enter_context(TlsFront(port, authority)).port

        cluster = stack.enter_context(RedisCluster(kind, aof=False, front=front, password="of-all"))
        verified = {"ssl_ca_certs": str(authority.ca_file)}
        [first, *_] = cluster.ask(cluster.servers[0], "CLUSTER", "SLOTS")
        url = f"cluster-streams+rediss://:of-all@127.0.0.1:{first[2][1]}"
        use_everything(url, ["a", "b", "c", "d"], **verified)
        own = redis.RedisCluster("127.0.0.1", first[2][1], password="of-all", ssl=True, **verified)
        use_everything("cluster-streams://", ["a", "b", "c", "d"], client=own)
        assert own.set("mine", "1")
        own.close()
        with pytest.raises(StoreConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(url).ping()
        with pytest.raises(StoreConnectionError, match="invalid username-password"):
            connect(url.replace("of-all", "wrong"), **verified).ping()


# ------------------------------------------------------------------ under load
def kill_master(cluster: RedisCluster, key: str | int) -> float:
    """SIGKILL; returns when its replica serves in its place, with the time of the kill."""
    victim = cluster.master_of(key)
    moment = time.monotonic()
    victim.kill()
    wait_until(lambda: _master(cluster, key), 20, "another master")
    return moment


def _master(cluster: RedisCluster, key: str | int) -> RedisServer | None:
    try:
        return cluster.master_of(key)
    except LookupError:
        return None


def failovers(cluster: RedisCluster, prefix: str, places: list[str | int], pause: float) -> Load:
    """Kill the masters of these in turn under load, and start them again."""
    kills = []
    with Load(cluster.url(), prefix, queues_on(cluster)) as load:
        for place in places:
            start = time.monotonic()
            kills.append(kill_master(cluster, place))
            load.progress(20)
            for server in cluster.servers:
                if not server.process.alive:
                    server.start()
            cluster.wait_well()
            time.sleep(max(0.0, pause - (time.monotonic() - start)))
    assert load.doubled(kills, EXPLAINED) == []
    return load


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("count", "pause"), [(2, 0.0), pytest.param(9, 20.0, marks=pytest.mark.long)])
def test_masters_die_under_load(cluster: RedisCluster, prefix: str, count: int, pause: float) -> None:
    """That of a queue, and that of the workers' registry and the subscriptions."""
    one, two, three = queues_on(cluster)
    load = failovers(cluster, prefix, [one, f"{prefix}:{{@}}", two, three][:count] * (-(-count // 4)), pause)
    assert load.refused == 0
    assert load.longest < 10
    assert not load.missing()


@pytest.mark.long
def test_masters_say_nothing(cluster: RedisCluster, prefix: str) -> None:
    """As a machine that lost its power: all goes on within some seconds of the failover, long before any time-out."""
    one, two, _ = queues_on(cluster)
    with Load(cluster.url(), prefix, queues_on(cluster)) as load:
        for key in (f"{{{one}}}", f"{{{two}}}", f"{prefix}:{{@}}"):
            master = cluster.master_of(key)
            [replica] = cluster.replicas_of(master)
            master.freeze()
            wait_until(lambda replica=replica: cluster.ask(replica, "ROLE")[0] == b"master", 20, "another master")
            try:
                load.progress(10, 10)
            finally:
                master.thaw()
            wait_until(lambda master=master: cluster.ask(master, "ROLE")[0] == b"slave", 20, "it follows")
            cluster.wait_well()
    assert load.refused == 0
    assert load.longest < 8
    assert not load.missing()


@pytest.mark.long
@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent", "eventlet"])
def test_every_pool_survives_a_failover(cluster: RedisCluster, celery: CeleryRig, pool: str) -> None:
    queues = queues_on(cluster)
    celery.use(cluster.url(), queues=queues)
    worker = celery.worker(pool=pool, concurrency=4)
    for part in ("before", "after"):
        if part == "after":
            kill_master(cluster, f"{{{queues[0]}}}")
        for queue in queues:
            celery.send_all("work", [f"{part} {queue} {number}" for number in range(20)], queue=queue)
        celery.ledger.wait("end", 60 if part == "before" else 120, 20)
    assert celery.app.control.ping(timeout=5, limit=1)
    worker.stop()
    assert celery.ledger.verdict().clean


def migrations(cluster: RedisCluster, queues: list[str], prefix: str, rounds: int) -> int:
    """Move the slots of all queues and of what belongs to none to the next master, and so on; how many keys moved."""
    moved = 0
    for _ in range(rounds):
        for slot in [*map(slot_of, queues), int(key_slot(f"{prefix}:{{@}}".encode()))]:
            masters = cluster.masters()
            source = cluster.master_of(slot)
            target = masters[(masters.index(source) + 1) % len(masters)]
            moved += cluster.migrate(slot, target, lambda key: time.sleep(0.02))
    return moved


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.long)])
def test_slots_move_under_load(cluster: RedisCluster, prefix: str, rounds: int) -> None:
    """Key by key, with pauses in which half of a queue's keys are here and half there. Who lives is not taken for
    dead, although its subscription is with a node that is not asked for it any more."""
    holder = connect(cluster.url(), prefix=prefix)
    holder.publish("held", [Message(b"held")])
    consumer = holder.consume(["held"])
    [held] = consumer.receive(5)
    with Load(cluster.url(), prefix, queues_on(cluster)) as load:
        assert migrations(cluster, load.queues, prefix, rounds) > rounds * 8
        load.progress(20)
        time.sleep(3)
    [holding] = holder.inspector().stats("held").holders
    assert (holding.count, holding.max_delivery_count, held.lost) == (1, 1, False)
    holder.close()
    assert load.refused == 0
    assert not load.missing()
    assert load.doubled() == []


def test_half_a_slot(cluster: RedisCluster, prefix: str) -> None:
    """While a queue's keys are in two places single keys are found in either, and nothing is done by halves."""
    engine = connect(cluster.url(), prefix=prefix, publish_timeout=10.0)
    engine.publish("q", [Message(b"dead"), Message(b"waits")])
    consumer = engine.consume(["q"])
    [delivery] = consumer.receive(5, 1)
    consumer.dead_letter(delivery, "as asked")
    wait_until(lambda: engine.inspector().stats("q").dead == 1, 5, "a dead letter")
    consumer.close()
    slot, halfway, on = slot_of("q"), threading.Event(), threading.Event()
    source = cluster.master_of(slot)
    target = next(server for server in cluster.masters() if server is not source)

    def pause(key: bytes) -> None:
        if key.endswith(b":dead"):
            halfway.set()
            on.wait(10)

    def publish() -> None:
        engine.publish("q", [Message(b"more")])

    def count() -> None:
        with closing(connect(cluster.url(), prefix=prefix, publish_timeout=10.0)) as other:
            counted.append(other.ready("q"))

    counted: list[int] = []
    mover, *waiting = [threading.Thread(target=cluster.migrate, args=(slot, target, pause)),
                       threading.Thread(target=publish), threading.Thread(target=count)]
    mover.start()
    assert halfway.wait(10)
    assert [letter.message.body for letter in engine.inspector().dead("q")] == [b"dead"]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(0.5)
        assert thread.is_alive()
    on.set()
    for thread in (mover, *waiting):
        thread.join(10)
    assert cluster.master_of(slot) is target
    assert counted[0] in (1, 2)
    assert [each.message.body for each in engine.consume(["q"], no_ack=True).receive(5, 5)] == [b"waits", b"more"]
    engine.close()


def test_a_worker_survives_a_failover(cluster: RedisCluster, celery: CeleryRig) -> None:
    """The same worker process goes on, its remote control too, and a worker that is killed then is found dead."""
    queues = queues_on(cluster)
    celery.use(cluster.url(), queues=queues)
    worker = celery.worker(pool="threads", concurrency=4)
    celery.send_all("work", [f"before {queue}" for queue in queues])
    celery.ledger.wait("end", 3, 10)
    kill_master(cluster, f"{celery.prefix}:{{@}}")
    for queue in queues:
        celery.send("work", f"after {queue}", queue=queue)
    celery.ledger.wait("end", 6, 20)
    wait_until(lambda: celery.app.control.ping(timeout=1, limit=1), 15, "remote control answers")
    held = [celery.send("hold", f"held {queue}", queue=queue) for queue in queues]
    celery.ledger.wait("start", 6 + len(held), 10)
    celery.worker("survivor", pool="threads", concurrency=4, options=["--without-mingle"])
    killed = time.time()
    worker.kill()
    seconds_to_restart(celery.ledger, killed, 3, 40)
    celery.flag("release")
    celery.ledger.wait("end", 9, 10)
    assert celery.ledger.verdict().clean


# ------------------------------------------------------------------ what replication costs and saves
def publish_while_the_replica_is_away(cluster: RedisCluster, prefix: str) -> tuple[int, int]:
    """20 messages to a master whose replica does not follow, then its death; how many were confirmed, how many are
    there."""
    engine = connect(cluster.url(), prefix=prefix, publish_timeout=20.0)
    engine.publish("q", [Message(b"first")])
    master = cluster.master_of("{q}")
    [replica] = cluster.replicas_of(master)
    wait_until(lambda: cluster.ask(replica, "READONLY") and cluster.ask(replica, "DBSIZE") ==
               cluster.ask(master, "DBSIZE"), 5, "the replica has all")
    replica.freeze()
    cluster.ask(master, "CLIENT", "KILL", "TYPE", "replica")
    confirmed: list[int] = []

    def publish() -> None:
        for number in range(20):
            engine.publish("q", [Message(b"%d" % number)])
            confirmed.append(number)

    thread = threading.Thread(target=publish)
    thread.start()
    time.sleep(0.3)
    master.kill()
    replica.thaw()
    wait_until(lambda: _master(cluster, "{q}"), 20, "the replica is the master")
    # it has a replica again, whose copy is the old master's no more
    master.start()
    thread.join(40)
    count = engine.inspector().stats("q").ready - 1
    engine.close()
    return len(confirmed), count


@pytest.mark.parametrize("arguments", [(), ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "1")])
def test_only_a_server_that_asks_for_replicas_keeps_what_it_confirms(kind: str, prefix: str,
                                                                     arguments: tuple[str, ...]) -> None:
    """A master that confirms while no replica follows takes that with it when it dies."""
    with RedisCluster(kind, masters=3, replicas=1, node_timeout=NODE_TIMEOUT, arguments=arguments) as cluster:
        confirmed, stored = publish_while_the_replica_is_away(cluster, prefix)
    assert confirmed == 20
    assert stored == 20 if arguments else stored < 20
