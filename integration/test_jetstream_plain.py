"""The plain connection that publishes: answers from many threads at once, in order, deferred; the same logins, TLS and
fail-over as the link; the link in its place where it cannot be."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nkeys
import pytest

from streambroker.engines.jetstream.address import Address
from streambroker.engines.jetstream.link import Frame, Link, Reply
from streambroker.engines.jetstream.plain import Plain
from streambroker.errors import AuthenticationError, Closed, MessageTooLarge
from streambroker.settings import Settings
from streambroker.testing.faults import Proxy
from streambroker.testing.natsjwt import KeyPair, Operator
from streambroker.testing.natsserver import NatsCluster, NatsServer
from streambroker.testing.servers import wait_until
from streambroker.testing.tls import Authority

NOBODY = Frame("nobody.is.here")
Make = Callable[..., Plain]


@pytest.fixture(scope="module")
def shared() -> Iterator[NatsServer]:
    """With a stream that takes `jobs.>`."""
    with NatsServer() as server:
        stream(server, "jobs.>")
        yield server


@pytest.fixture
def own() -> Iterator[NatsServer]:
    with NatsServer() as server:
        stream(server, "jobs.>")
        yield server


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(url, **options)`: a plain connection beside a link that is open."""
    made: list[tuple[Plain, Link]] = []

    def new(url: str, *, connect: bool = True, **options: Any) -> Plain:
        settings = Settings(socket_timeout=3, socket_connect_timeout=2)
        link = Link(Address(url, options), settings)
        made.append((Plain(link, settings), link))
        if connect:
            link.open(5)
        return made[-1][0]

    yield new
    for plain, link in made:
        plain.close()
        link.close()


@pytest.fixture
def plain(shared: NatsServer, make: Make) -> Plain:
    return make(shared.url())


def stream(server: NatsServer, *subjects: str, **more: Any) -> None:
    made = server.api("STREAM.CREATE.JOBS", {"name": "JOBS", "subjects": subjects, **more})
    assert "error" not in made, made


def stored(replies: list[Reply | None]) -> list[int]:
    """Their sequences; all must be there."""
    assert all(reply and reply.status == 0 for reply in replies), replies
    return [json.loads(reply.data)["seq"] for reply in replies if reply]


def publish(plain: Plain, count: int = 1) -> list[int]:
    found = stored(plain.requests([Frame("jobs.a", b"%d" % number) for number in range(count)], 5))
    assert plain.connected
    return found


# ---------------------------------------------------------------- answers

def test_the_first_go_over_the_link_the_others_over_a_connection_of_their_own(shared: NatsServer, make: Make) -> None:
    plain = make(shared.url(), connect=False)
    assert len(stored(plain.requests([Frame("jobs.a")], 5))) == 1
    assert not plain.connected
    assert len(stored(plain.requests([Frame("jobs.a")], 5))) == 1
    assert plain.connected


def test_many_are_stored_in_order(plain: Plain) -> None:
    first, *others = publish(plain, 1700)
    assert others == list(range(first + 1, first + 1700))
    assert plain.requests([], 1) == []


def test_headers_and_large_bodies_travel_whole(shared: NatsServer, plain: Plain) -> None:
    body = bytes(range(256)) * 4000
    frames = [Frame("jobs.large", body + b"%d" % number, headers={"Nats-Msg-Id": f"large-{number % 10}"})
              for number in range(12)]
    replies = plain.requests(frames, 20)
    assert [json.loads(reply.data).get("duplicate", False) for reply in replies if reply] == [False] * 10 + [True] * 2
    kept = shared.api("STREAM.INFO.JOBS", {"subjects_filter": "jobs.large"})
    assert kept["state"]["subjects"] == {"jobs.large": 10}


def test_nobody_there_is_an_answer(plain: Plain) -> None:
    replies = plain.requests([NOBODY, Frame("jobs.a"), NOBODY], 5)
    assert [reply and reply.status for reply in replies] == [503, 0, 503]


def test_no_answer_in_time(plain: Plain) -> None:
    plain._link.listen("t.silent", lambda reply: None)
    start = time.monotonic()
    replies = plain.requests([Frame("t.silent"), Frame("jobs.a")], 0.5)
    assert (replies[0], stored(replies[1:]) != []) == (None, True)
    assert 0.4 < time.monotonic() - start < 2
    assert plain._sent == {}
    assert publish(plain)


def test_one_that_gets_no_answer_holds_up_nobody(plain: Plain) -> None:
    plain._link.listen("t.silent", lambda reply: None)
    publish(plain)
    waiting = threading.Thread(target=plain.requests, args=([Frame("t.silent")], 2.0))
    waiting.start()
    wait_until(lambda: plain._sent, 5, "the request is on its way")
    start = time.monotonic()
    for _ in range(10):
        publish(plain)
    assert time.monotonic() - start < 1.0
    assert waiting.is_alive()
    waiting.join()


def test_a_message_over_the_limit_is_refused_before_anything_is_sent(shared: NatsServer, plain: Plain) -> None:
    publish(plain)
    before = shared.base().held
    with pytest.raises(MessageTooLarge, match="1048577 bytes, the server takes 1048576"):
        plain.requests([Frame("jobs.a")] * 600 + [Frame("jobs.a", b"x" * 1048577)], 5)
    assert shared.base().held == before
    assert publish(plain)


def test_from_many_threads_over_one_connection(shared: NatsServer, plain: Plain) -> None:
    publish(plain)
    clients = len(shared.look("connz")["connections"])
    sequences: list[int] = []

    def work() -> None:
        for _ in range(100):
            sequences.extend(publish(plain, 2))

    run_threads([work] * 12)
    assert len(set(sequences)) == 2400
    assert len(shared.look("connz")["connections"]) == clients
    assert (plain._sent, list(plain._queued)) == ({}, [])


# ---------------------------------------------------------------- deferred

def test_deferred_answers_come_later_and_to_their_own(plain: Plain) -> None:
    publish(plain)
    tickets = [plain.begin([Frame("jobs.a"), Frame("jobs.a")], 5) for _ in range(50)]
    sequences = [sequence for ticket in reversed(tickets) for sequence in reversed(stored(plain.finish(ticket, 5)))]
    assert sequences == list(range(sequences[0], sequences[0] - 100, -1))
    assert stored(plain.finish(tickets[0], 5))


def test_deferred_ones_are_sent_while_another_thread_waits(shared: NatsServer, plain: Plain) -> None:
    plain._link.listen("t.silent", lambda reply: None)
    publish(plain)
    before = shared.api("STREAM.INFO.JOBS")["state"]["messages"]
    waiting = threading.Thread(target=plain.requests, args=([Frame("t.silent")], 2.0))
    waiting.start()
    wait_until(lambda: plain._sent, 5, "the request is on its way")
    ticket = plain.begin([Frame("jobs.a")], 5)
    wait_until(lambda: shared.api("STREAM.INFO.JOBS")["state"]["messages"] == before + 1, 1.5, "it is stored")
    assert waiting.is_alive()
    waiting.join()
    assert stored(plain.finish(ticket, 5))


def test_deferred_ones_that_break_are_told(own: NatsServer, make: Make) -> None:
    plain = make(own.url())
    publish(plain)
    own.freeze()
    ticket = plain.begin([Frame("jobs.a")], 5)
    own.thaw()
    own.kill()
    assert plain.finish(ticket, 5) in ([None], plain.finish(ticket, 0))
    assert plain.begin([Frame("jobs.a")], 0.2).replies == [None]


# ---------------------------------------------------------------- broken connections

@pytest.mark.parametrize("hard", [True, False])
def test_after_a_restart_it_is_made_again(own: NatsServer, make: Make, hard: bool) -> None:
    plain = make(own.url())
    for _ in range(3):
        publish(plain)
        own.restart(hard=hard)
        end = time.monotonic() + 10
        while plain.requests([Frame("jobs.a")], 2)[0] is None:
            assert time.monotonic() < end
    publish(plain)


def test_what_waits_when_the_server_dies_is_told_at_once(own: NatsServer, make: Make) -> None:
    plain = make(own.url())
    plain._link.listen("t.silent", lambda reply: None)
    publish(plain)
    threading.Timer(0.3, own.kill).start()
    start = time.monotonic()
    assert plain.requests([Frame("t.silent")] * 3, 20) == [None] * 3
    assert plain.requests([Frame("jobs.a")], 0.2) == [None]
    assert time.monotonic() - start < 5


def test_a_connection_that_ended_while_idle_costs_no_publish(own: NatsServer, make: Make) -> None:
    with Proxy(own.port) as proxy:
        plain = make(own.url(port=proxy.port))
        publish(plain)
        wait_until(lambda: time.monotonic() - plain._wire.heard > 1.1 if plain._wire else False, 5, "it is idle")
        proxy.drop()
        wait_until(lambda: plain._link.epoch == 2 and plain._link.connected, 10, "the link is back")
        publish(plain)


def test_a_frozen_server_costs_the_time_given_and_no_more(own: NatsServer, make: Make) -> None:
    plain = make(own.url())
    publish(plain)
    own.freeze()
    start = time.monotonic()
    assert plain.requests([Frame("jobs.a")], 0.5) == [None]
    # more than the socket's buffers take
    assert plain.requests([Frame("jobs.a", b"x" * 1_000_000)] * 20, 0.5) == [None] * 20
    assert time.monotonic() - start < 4
    own.thaw()
    wait_until(lambda: plain.requests([Frame("jobs.a")], 5)[0], 10, "it answers again")


def test_a_reply_that_is_lost_is_told_at_once(own: NatsServer, make: Make) -> None:
    with Proxy(own.port) as proxy:
        plain = make(own.url(port=proxy.port))
        publish(plain)
        proxy.drop_reply(b"Nats-Msg-Id: once")
        assert plain.requests([Frame("jobs.a", headers={"Nats-Msg-Id": "once"})], 5) == [None]
        again = plain.requests([Frame("jobs.a", headers={"Nats-Msg-Id": "once"})], 5)[0]
        assert again and json.loads(again.data)["duplicate"]


def test_it_follows_the_link_to_another_server(make: Make) -> None:
    with NatsCluster() as cluster:
        stream(cluster.servers[0], "jobs.>", num_replicas=3)
        plain = make(cluster.servers[0].url())
        publish(plain)
        cluster.servers[0].kill()
        wait_until(lambda: plain.requests([Frame("jobs.a")], 2)[0], 20, "another server takes it")
        wait_until(lambda: publish_over_plain(plain), 20, "over a plain connection")
        session = plain._link.session
        assert session is not None and session.server.port != cluster.servers[0].port


def publish_over_plain(plain: Plain) -> bool:
    reply = plain.requests([Frame("jobs.a")], 2)[0]
    return bool(reply and reply.status == 0 and plain.connected)


# where it is interrupted while it dials, the socket is left to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_caller_that_is_interrupted_costs_the_connection_and_no_answer(plain: Plain) -> None:
    """What was half sent, or half read, would be taken for something else."""
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    publish(plain)
    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for round_ in range(60):
            # again: the collector swallows what comes while it works
            signal.setitimer(signal.ITIMER_REAL, 0.0004 + 0.00004 * round_, 0.5)
            try:
                while True:
                    replies = plain.requests([Frame("jobs.a", b"x" * 300)] * 3, 5)
                    if None in replies:
                        continue  # the link served, and was interrupted too: who publishes tries again
                    sequences = stored(replies)
                    assert sequences == list(range(sequences[0], sequences[0] + 3))
            except Interrupted:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 60
    wait_until(lambda: None not in plain.requests([Frame("jobs.a")], 5) and plain.connected, 20, "it serves again")
    assert publish(plain)
    assert plain._sent == {}
    gc.collect()


def test_closing(shared: NatsServer, make: Make) -> None:
    plain = make(shared.url())
    publish(plain)
    plain.close()
    assert not plain.connected
    assert stored(plain.requests([Frame("jobs.a")], 5))
    assert not plain.connected
    plain._link.close()
    with pytest.raises(Closed):
        plain.requests([Frame("jobs.a")], 5)


# ---------------------------------------------------------------- who may log in

def test_user_and_password(make: Make) -> None:
    with NatsServer(users={"jobs": "p /:@"}) as server:
        stream(server, "jobs.>")
        publish(make(server.url()))
        with pytest.raises(AuthenticationError):
            make(server.url(user="jobs", password="wrong"), connect=False).requests([Frame("jobs.a")], 5)


def test_token(make: Make) -> None:
    with NatsServer(token="secret") as server:
        stream(server, "jobs.>")
        publish(make(server.url()))


def test_nkey_and_credentials(make: Make) -> None:
    key, operator = KeyPair(nkeys.PREFIX_BYTE_USER), Operator()
    for config, options in (({"nkey": key.public}, {"nkeys_seed_str": key.seed}),
                            ({"config": operator.config}, {"user_credentials": operator.credentials("jobs")})):
        with NatsServer(**config) as server:
            plain = make(server.url(), **options)
            made = plain.requests([Frame("$JS.API.STREAM.CREATE.JOBS", b'{"name":"JOBS","subjects":["jobs.>"]}')], 5)
            assert made[0] and b'"error"' not in made[0].data
            publish(plain)


def test_tls(make: Make, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ca = {"ssl_ca_certs": str(authority.ca_file)}
    pem = authority.server_file("127.0.0.1")
    first = {"config": f'tls {{ cert_file: "{pem}", key_file: "{pem}", handshake_first: true }}'}
    allowed = {"config": f'tls {{ cert_file: "{pem}", key_file: "{pem}" }}\nallow_non_tls: true'}
    for server_options, scheme, options in (
            ({"tls": pem}, "jetstream-tls", ca), ({"tls": pem}, "jetstream", ca),
            ({"tls": pem}, "tls", {"ssl_cert_reqs": "none"}),
            ({"tls": pem, "ask_client": authority.ca_file}, "tls", {"ssl_certfile": str(authority.client_file), **ca}),
            (first, "tls", {"tls_handshake_first": True, **ca}), (allowed, "tls", ca)):
        with NatsServer(**server_options) as server:
            plain = make(server.url(scheme), **options)
            made = plain.requests([Frame("$JS.API.STREAM.CREATE.JOBS", b'{"name":"JOBS","subjects":["jobs.>"]}')], 5)
            assert made[0] and b'"error"' not in made[0].data
            publish(plain, 600)
            assert stored(plain.requests([Frame("jobs.a", b"x" * 1_000_000)] * 10, 20))
            tls = [client.get("tls_version") for client in server.look("connz")["connections"]]
            assert len(tls) == 2 and all(tls)


def test_what_a_user_may_not_do_is_told(make: Make) -> None:
    user = """authorization { users: [{user: jobs, password: p, permissions: {publish: {deny: "must.not"}}}] }"""
    with NatsServer(config=user) as server:
        plain = make(server.url(user="jobs", password="p"))
        replies = plain.requests([Frame("must.not"), NOBODY, Frame("must.not")], 5)
        assert [reply and reply.status for reply in replies] == [403, 503, 403]
        assert plain.connected


def test_where_it_cannot_be_the_link_serves(make: Make) -> None:
    """A user who may have one connection."""
    with NatsServer(config="max_connections: 1") as server:
        plain = make(server.url())
        made = plain.requests([Frame("$JS.API.STREAM.CREATE.JOBS", b'{"name":"JOBS","subjects":["jobs.>"]}')], 5)
        assert made[0] and b'"error"' not in made[0].data
        assert len(stored(plain.requests([Frame("jobs.a")] * 600, 5))) == 600
        ticket = plain.begin([Frame("jobs.a")], 5)
        assert stored(plain.finish(ticket, 5))
        assert not plain.connected
        run_threads([lambda: stored(plain.requests([Frame("jobs.a")], 5))] * 8)


# ---------------------------------------------------------------- forks and green worlds

def test_a_forked_child_makes_its_own(plain: Plain) -> None:
    publish(plain)
    child = os.fork()
    if not child:
        code = 1
        try:
            assert not plain.connected
            stored(plain.requests([Frame("jobs.a")], 5))
            publish(plain, 50)
            code = 0
        finally:
            os._exit(code)
    publish(plain, 50)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    publish(plain, 50)


GREEN = """
import {world}
{patch}
import json, logging, sys, threading, time
from streambroker.engines.jetstream.address import Address
from streambroker.engines.jetstream.link import Frame, Link
from streambroker.engines.jetstream.plain import Plain
from streambroker.settings import Settings
from streambroker.real import start_thread
link = Link(Address(sys.argv[1], dict(ssl_ca_certs=sys.argv[2])), Settings())
link.open(5)
plain = Plain(link, Settings())
stream = Frame("$JS.API.STREAM.CREATE.JOBS", b'{{"name":"JOBS","subjects":["jobs"]}}')
assert b'"error"' not in plain.requests([stream], 5)[0].data
assert plain.connected
beats = []
def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
sequences = []
def work():
    for number in range(50):
        for reply in plain.requests([Frame("jobs"), Frame("jobs")], 5):
            sequences.append(json.loads(reply.data)["seq"])
threads = [threading.Thread(target=work) for _ in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(set(sequences)) == 1000
link.listen("t.silent", lambda reply: None)
del beats[:]
plain.requests([Frame("t.silent")], 1.0)
assert len(beats) > 20, len(beats)      # others ran while it waited
told = []
start_thread(lambda: told.append(plain.requests([Frame("jobs")], 5)))     # from another OS thread
end = time.monotonic() + 5
while not told and time.monotonic() < end:
    time.sleep(0.01)
assert told[0][0].status == 0
plain.close()
link.close()
print("done")
"""


@pytest.mark.parametrize("world, patch", [
    ("gevent.monkey", "gevent.monkey.patch_all()"), ("eventlet", "eventlet.monkey_patch()"), ("threading", "")])
def test_green_worlds(tmp_path: Path, world: str, patch: str) -> None:
    authority = Authority(tmp_path)
    with NatsServer(tls=authority.server_file("127.0.0.1")) as server:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(GREEN.format(world=world, patch=patch)),
             server.url("tls"), authority.ca_file], capture_output=True, text=True, timeout=60,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
        assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr[-3000:]


def run_threads(works: list[Callable[[], object]]) -> None:
    failed: list[Exception] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # told below
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed
