"""The link to nats-servers: requests and listening from threads, coroutines and green worlds; restarts, hung servers,
lost words; every kind of login; TLS; forks."""

from __future__ import annotations

import logging
import os
import signal
import socket
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
from streambroker.errors import (
    AuthenticationError,
    Closed,
    ConfigurationError,
    MessageTooLarge,
    StoreConnectionError,
    StoreError,
)
from streambroker.settings import Settings
from streambroker.testing.faults import Proxy
from streambroker.testing.natsjwt import KeyPair, Operator
from streambroker.testing.natsserver import NatsCluster, NatsServer
from streambroker.testing.servers import wait_until
from streambroker.testing.tls import Authority

INFO = Frame("$JS.API.INFO")
NOBODY = Frame("nobody.is.here")
Make = Callable[..., Link]


@pytest.fixture(scope="module")
def shared() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def own() -> Iterator[NatsServer]:
    """To be stopped, killed, frozen."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(url, **options)`: a link, closed when the test is over."""
    links: list[Link] = []

    def new(url: str, *, settings: Settings | None = None, **options: Any) -> Link:
        links.append(Link(Address(url, options), settings or Settings(socket_timeout=3, socket_connect_timeout=2)))
        return links[-1]

    yield new
    for link in links:
        link.close()


@pytest.fixture
def link(shared: NatsServer, make: Make) -> Link:
    return make(shared.url())


class Heard:
    """A handler that remembers."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []

    def __call__(self, reply: Reply) -> None:
        self.replies.append(reply)

    @property
    def data(self) -> list[bytes]:
        return [reply.data for reply in self.replies]


# ---------------------------------------------------------------- requests

def test_it_connects_at_first_use_and_tells_about_the_server(shared: NatsServer, link: Link) -> None:
    assert (link.epoch, link.connected, link.version) == (0, False, "")
    assert b"account_info_response" in link.request(INFO, 5).data
    assert (link.epoch, link.connected, link.max_payload) == (1, True, 1024 * 1024)
    assert f"nats {link.version}" == shared.version()


def test_nobody_there_is_an_answer(link: Link) -> None:
    reply = link.request(NOBODY, 5)
    assert (reply.status, reply.data) == (503, b"")


def test_headers_and_replies_travel_whole(link: Link) -> None:
    heard = Heard()
    link.listen("t.whole.>", heard).close()
    listener = link.listen("t.whole.*", heard)
    frames = [Frame("t.whole.a", b"\r\n\0" * 5, "back.to", {"Nats-Msg-Id": "a: b", "X": "ü"}), Frame("t.whole.b")]
    assert link.post(frames)
    listener.drain_now(5)
    assert heard.replies == [
        Reply("t.whole.a", b"\r\n\0" * 5, "back.to", 0, {"Nats-Msg-Id": "a: b", "X": "ü"}), Reply("t.whole.b", b"")]


def test_many_requests_are_answered_in_order(link: Link) -> None:
    echo(link, "t.echo")
    replies = link.requests([Frame("t.echo", b"%d" % number) for number in range(2300)], 20)
    assert [reply.data for reply in replies if reply] == [b"%d" % number for number in range(2300)]
    assert link.requests([], 1) == []


def test_bytes_in_flight_are_bounded(link: Link) -> None:
    """40 MB of bodies at once: each arrives, in parts."""
    echo(link, "t.large")
    replies = link.requests([Frame("t.large", bytes([number]) * 1_000_000) for number in range(40)], 30)
    assert [reply.data[:1] for reply in replies if reply] == [bytes([number]) for number in range(40)]


def test_some_without_an_answer_leave_the_others_theirs(link: Link) -> None:
    echo(link, "t.some")
    link.listen("t.silent", Heard())
    start = time.monotonic()
    replies = link.requests([Frame("t.some", b"1"), Frame("t.silent"), Frame("t.some", b"2")], 0.5)
    assert [reply and reply.data for reply in replies] == [b"1", None, b"2"]
    assert 0.4 < time.monotonic() - start < 2


def test_no_answer_in_time_is_an_error_and_a_late_one_is_nobodys(link: Link) -> None:
    heard = Heard()
    link.listen("t.late", heard)
    with pytest.raises(StoreConnectionError, match=r"no answer on t\.late"):
        link.request(Frame("t.late"), 0.2)
    assert link.post([Frame(heard.replies[0].reply, b"late")])
    assert link.request(NOBODY, 5).status == 503


def test_a_message_over_the_limit_is_refused_before_anything_is_sent(link: Link) -> None:
    heard = Heard()
    link.listen("t.limit", heard)
    large = Frame("t.limit", b"x" * (1024 * 1024), headers={"A": "b"})
    sizes = r"1048594 bytes, the server takes 1048576"
    for send in (lambda: link.request(large, 5), lambda: link.post([Frame("t.limit"), large]),
                 lambda: link.requests([Frame("t.limit")] * 600 + [large], 5)):
        with pytest.raises(MessageTooLarge, match=sizes):
            send()
    assert link.request(NOBODY, 5).status == 503
    assert (heard.data, link.epoch) == ([], 1)


@pytest.mark.parametrize("frame", [Frame("a b"), Frame(""), Frame("a\r\nPUB b 0\r\n"), Frame("a", reply="b c"),
                                   Frame("a", headers={"A": "b\r\nC: d"}), Frame("a", headers={"A:": "b"})])
def test_nothing_can_be_smuggled_in(link: Link, frame: Frame) -> None:
    link.open(5)
    with pytest.raises(ConfigurationError):
        link.post([frame])
    assert link.request(NOBODY, 5).status == 503


def test_from_many_threads(link: Link) -> None:
    echo(link, "t.threads")
    wrong: list[object] = []

    def work(name: int) -> None:
        for number in range(100):
            text = b"%d %d" % (name, number)
            answers = [link.request(Frame("t.threads", text), 10), *link.requests([Frame("t.threads", text)] * 3, 10)]
            wrong.extend(answer for answer in answers if answer is None or answer.data != text)

    run_threads([lambda name=name: work(name) for name in range(12)])
    assert not wrong
    assert link.epoch == 1


def test_a_caller_that_is_interrupted_leaves_nothing(link: Link) -> None:
    link.listen("t.silent2", Heard())

    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            link.request(Frame("t.silent2"), 10)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert link._connection.answers.waiting == 0


# ---------------------------------------------------------------- in the loop's thread

def test_coroutines_ask_and_listen(link: Link) -> None:
    link.open(5)

    async def work() -> list[object]:
        listener = await link.alisten("t.co.*", heard)
        link.post([Frame("t.co.1", b"1"), Frame("t.co.2", b"2")])
        await listener.drain()
        link.post([Frame("t.co.3", b"3")])
        reply = await link.ask(NOBODY, 5)
        try:
            await link.ask(Frame("t.co.silent"), 0.1)
        except StoreConnectionError as error:
            return [reply.status, str(error)]
        return []

    heard = Heard()
    link.listen("t.co.silent", Heard())
    status, told = link.run(work, 5)
    assert status == 503 and "no answer on t.co.silent" in str(told)
    assert heard.data == [b"1", b"2"]


def test_callbacks_and_timers(link: Link) -> None:
    done = threading.Event()
    link.call_soon(lambda: link.call_later(0.01, done.set) and None)
    assert done.wait(5)


def test_failing_callbacks_are_told_and_harm_nobody(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("a task of mine")

    def handler(reply: Reply) -> None:
        raise KeyError("a handler of mine")

    link.on_connect.append(lambda: 1 / 0)
    listener = link.listen("t.fail", handler)
    link.call_soon(lambda: link.spawn(fail()))
    link.post([Frame("t.fail")])
    listener.drain_now(5)
    assert link.request(NOBODY, 5).status == 503
    told = caplog.text
    assert all(part in told for part in ("a task of mine", "a handler of mine", "division by zero"))


# ---------------------------------------------------------------- broken connections

@pytest.mark.parametrize("hard", [True, False])
def test_it_comes_back_after_a_restart_with_its_subscriptions(own: NatsServer, make: Make, hard: bool) -> None:
    link, heard, events = make(own.url()), Heard(), []
    link.on_connect.append(lambda: events.append("up"))
    link.on_disconnect.append(lambda: events.append("down"))
    kept, closed = link.listen("t.kept", heard), link.listen("t.closed", heard)
    closed.close()
    own.restart(hard=hard)
    wait_until(lambda: link.epoch == 2, 10, "a second connection")
    assert link.post([Frame("t.closed", b"no"), Frame("t.kept", b"yes")])
    kept.drain_now(5)
    assert heard.data == [b"yes"]
    assert events == ["up", "down", "up"]


def test_what_waits_when_the_server_dies_is_told_at_once(own: NatsServer, make: Make) -> None:
    link = make(own.url())
    link.listen("t.silent", Heard())
    threading.Timer(0.3, own.kill).start()
    start = time.monotonic()
    assert link.requests([Frame("t.silent")] * 3, 20) == [None] * 3
    assert time.monotonic() - start < 5
    assert not link.post([Frame("x")])
    with pytest.raises(StoreConnectionError, match="no connection to jetstream://127"):
        link.request(NOBODY, 0.3)
    with pytest.raises(StoreConnectionError, match="no connection"):
        link.listen("t.x", Heard())
    assert link.requests([NOBODY], 0.1) == [None]
    own.start()
    assert link.request(NOBODY, 10).status == 503


def test_a_server_that_comes_later_is_found(make: Make) -> None:
    server = NatsServer()
    link = make(server.url())
    try:
        with pytest.raises(StoreConnectionError, match=r"refused|Connect call failed"):
            link.open(0.3)
        server.start()
        wait_until(lambda: link.connected, 10, "connecting goes on behind the scenes")
    finally:
        server.close()


def test_what_was_posted_to_a_dead_connection_never_goes_to_the_next_one(own: NatsServer, make: Make) -> None:
    """However a restart falls between the posts of a busy thread: what arrives was posted to that server."""
    link, heard, over = make(own.url()), Heard(), threading.Event()
    listener = link.listen("t.epoch", heard)
    sent: list[bytes] = []

    def post() -> None:
        while not over.is_set():
            text = b"%d" % link.epoch
            if link.post([Frame("t.epoch", text)]):
                sent.append(text)
            time.sleep(0)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        for epoch in (2, 3):
            own.restart(hard=True)
            wait_until(lambda epoch=epoch: link.epoch == epoch, 10, "the next connection")
            heard.replies.clear()
            wait_until(lambda: heard.data, 10, "messages on it")
            # the first may have been read just before the epoch grew
            assert set(heard.data) <= {b"%d" % epoch, b"%d" % (epoch - 1)}
            assert heard.data.count(b"%d" % (epoch - 1)) <= 1
    finally:
        over.set()
        thread.join()
    listener.close()


def test_a_frozen_server_costs_the_time_given_and_no_more(own: NatsServer, make: Make) -> None:
    link = make(own.url())
    link.open(5)
    own.freeze()
    start = time.monotonic()
    with pytest.raises(StoreConnectionError, match="no answer"):
        link.request(NOBODY, 0.5)
    # more than the socket's buffers take
    assert link.requests([Frame("t.x", b"x" * 1_000_000)] * 20, 0.5) == [None] * 20
    assert time.monotonic() - start < 3
    own.thaw()
    assert link.request(NOBODY, 10).status == 503
    own.freeze()
    link.post([Frame("t.x", b"x" * 1_000_000)] * 20)
    start = time.monotonic()
    link.close(1.0)
    assert time.monotonic() - start < 3
    own.thaw()


def test_an_answer_that_nobody_waits_for_any_more_harms_nobody(own: NatsServer, make: Make,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    link = make(own.url())
    first, second = link.listen("t.1", Heard()), link.listen("t.2", Heard())
    own.freeze()
    first.drain_now(0.1)
    second.drain_now(0.1)
    own.thaw()
    assert link.request(NOBODY, 5).status == 503
    assert (link.epoch, [record for record in caplog.records if record.levelno >= logging.ERROR]) == (1, [])


def test_a_hung_connection_is_given_up_and_replaced(own: NatsServer, make: Make,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Words pass no more, no socket tells; with bytes still unsent, too."""
    monkeypatch.setattr("streambroker.engines.jetstream.session.PING_INTERVAL", 0.3)
    with Proxy(own.port) as proxy:
        link = make(own.url(port=proxy.port))
        link.open(5)
        proxy.hold()
        link.post([Frame("t.x", b"x" * 1_000_000)] * 20)
        wait_until(lambda: not link.connected, 5, "the hung connection is given up")
        proxy.release()
        wait_until(lambda: link.epoch == 2, 10, "the next one")
        assert link.request(NOBODY, 5).status == 503


def test_the_other_servers_of_a_cluster_take_over_also_those_not_named(make: Make) -> None:
    with NatsCluster() as cluster:
        names = {server.port: server for server in cluster.servers}
        link = make(cluster.servers[0].url())
        heard = Heard()
        link.listen("t.cluster", heard)
        for epoch in (2, 3):
            session = link._connection.session
            assert session is not None
            names[session.server.port].kill()
            wait_until(lambda epoch=epoch: link.epoch == epoch, 10, "another server")
        link.post([Frame("t.cluster", b"1")])
        assert link.request(NOBODY, 5).status == 503
        assert heard.data == [b"1"]


def test_close_sends_what_was_posted_and_ends_the_thread(shared: NatsServer, make: Make) -> None:
    link, other, heard = make(shared.url()), make(shared.url()), Heard()
    listener = other.listen("t.close", heard)
    link.open(5)
    link.post([Frame("t.close", b"%d" % number) for number in range(1000)])
    link.close()
    link.close()
    listener.drain_now(5)
    assert len(heard.data) == 1000
    for use in (lambda: link.open(1), lambda: link.request(NOBODY, 1), lambda: link.listen("x", heard),
                lambda: link.call_soon(lambda: None)):
        with pytest.raises(Closed):
            use()
    assert not link.post([Frame("x")])
    make(shared.url()).close()


# ---------------------------------------------------------------- who may log in

def login(url: str, make: Make, **options: Any) -> str:
    return str(make(url, **options).request(INFO, 5).data[:40])


def refused(url: str, make: Make, **options: Any) -> str:
    link = make(url, **options)
    start = time.monotonic()
    with pytest.raises(AuthenticationError, match="refused the login") as caught:
        link.open(10)
    assert time.monotonic() - start < 4
    return f"{caught.value!r} {link.address!r} {link!r}"


def test_user_and_password(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with NatsServer(users={"jobs": "hidden /:@1"}) as server:
        assert login(server.url(), make)
        assert login(f"jetstream://127.0.0.1:{server.port}", make, user="jobs", password="hidden /:@1")
        told = refused(server.url(user="jobs", password="hidden2"), make)
        told += refused(server.url("nats", user="other", password="hidden3"), make)
        with pytest.raises(AuthenticationError):
            make(f"jetstream://127.0.0.1:{server.port}").open(5)
    assert "hidden" not in told + caplog.text


def test_token(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with NatsServer(token="hidden1") as server:
        assert login(server.url(), make)
        assert login(f"jetstream://127.0.0.1:{server.port}", make, token="hidden1")
        told = refused(server.url(user="hidden2"), make)
    assert "hidden" not in told + caplog.text


def test_nkey(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key, other = (KeyPair(nkeys.PREFIX_BYTE_USER) for _ in range(2))
    (tmp_path / "seed").write_text(key.seed + "\n")
    with NatsServer(nkey=key.public) as server:
        assert login(server.url(), make, nkeys_seed_str=key.seed)
        assert login(server.url(), make, nkeys_seed=str(tmp_path / "seed"))
        told = refused(server.url(), make, nkeys_seed_str=other.seed)
        with pytest.raises(ConfigurationError, match="key or the credentials") as caught:
            make(server.url(), nkeys_seed_str=other.seed[:-9]).open(5)
        told += str(caught.value)
    assert not any(pair.seed[:-9] in told + caplog.text for pair in (key, other))


def test_credentials_file(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    operator, stranger = Operator(), Operator()
    credentials = operator.credentials("jobs")
    (tmp_path / "jobs.creds").write_text(credentials)
    with NatsServer(config=operator.config) as server:
        assert login(server.url(), make, user_credentials=str(tmp_path / "jobs.creds"))
        assert login(server.url(), make, user_credentials=credentials)
        told = refused(server.url(), make, user_credentials=stranger.credentials("jobs"))
        link = make(server.url(), user_credentials=str(tmp_path / "nothing"))
        with pytest.raises(ConfigurationError, match="cannot be read"):
            link.open(5)
        (tmp_path / "nothing").write_text(credentials)
        assert link.request(INFO, 5)
    assert "SU" not in told and credentials.splitlines()[1] not in told + caplog.text


def test_credentials_that_expire_are_read_again(make: Make, tmp_path: Path) -> None:
    operator, file = Operator(), tmp_path / "jobs.creds"
    file.write_text(operator.credentials("jobs", lifetime=2))
    with NatsServer(config=operator.config) as server:
        link = make(server.url(), user_credentials=str(file))
        link.open(5)
        file.write_text(operator.credentials("jobs"))
        wait_until(lambda: link.epoch == 2, 15, "a second login")
        assert link.request(INFO, 5).status == 0


def test_a_password_that_is_changed_is_asked_for_until_it_fits(make: Make) -> None:
    """A running link gives up at no refused login, but tells it."""
    with NatsServer(config='authorization { user: "jobs", password: "one" }') as server:
        link = make(server.url(user="jobs", password="one"))
        link.open(5)
        server.configure('authorization { user: "jobs", password: "two" }')
        server.restart()
        wait_until(lambda: link._connection.refused, 10, "the login is refused")
        with pytest.raises(AuthenticationError):
            link.request(INFO, 5)
        server.configure('authorization { user: "jobs", password: "one" }')
        server.restart()
        wait_until(lambda: link.connected, 10, "the old password fits again")


def test_what_a_user_may_not_do_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    user = """authorization { users: [{user: jobs, password: p, permissions: {
        publish: {allow: ["$JS.API.>", "may.>"]}, subscribe: {allow: ["_INBOX.jobs.>", "may.>"]}}}] }"""
    with NatsServer(config=user) as server:
        url = server.url(user="jobs", password="p")
        with pytest.raises(AuthenticationError, match=r"may not subscribe to _INBOX\.>.*inbox_prefix"):
            make(url).open(5)
        link = make(url, inbox_prefix="_INBOX.jobs")
        assert link.request(INFO, 5).status == 0
        reply = link.request(Frame("must.not"), 5)
        assert (reply.status, "must.not" in reply.description.lower()) == (403, True)
        assert "lacks a permission" in caplog.text
        with pytest.raises(StoreError, match=r"may not subscribe to must\.not"):
            link.listen("must.not", Heard())
        assert (link.epoch, link.request(NOBODY._replace(subject="may.1"), 5).status) == (1, 503)


# ---------------------------------------------------------------- TLS

@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def test_tls_is_verified(make: Make, authority: Authority, tmp_path: Path) -> None:
    ca = {"ssl_ca_certs": str(authority.ca_file)}
    with NatsServer(tls=authority.server_file("127.0.0.1"), users={"jobs": "p"}) as server:
        assert login(server.url("jetstream-tls"), make, **ca)
        assert login(server.url("tls"), make, ssl_cert_reqs="none")
        # a server that demands it gets it from plain addresses too
        assert login(server.url(), make, **ca)
        assert login(server.url("tls").replace("127.0.0.1", "localhost"), make, ssl_check_hostname=False, **ca)
        for url, options in ((server.url("tls"), {}), (server.url(), {}),
                             (server.url("tls"), {"ssl_ca_certs": str(Authority(tmp_path).ca_file)})):
            with pytest.raises(StoreConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                make(url, **options).open(2)
        with pytest.raises(StoreConnectionError, match=r"(?i)hostname mismatch"):
            make(server.url("tls").replace("127.0.0.1", "localhost"), **ca).open(2)


def test_certificates_of_clients(make: Make, authority: Authority) -> None:
    ca = {"ssl_ca_certs": str(authority.ca_file)}
    with NatsServer(tls=authority.server_file("127.0.0.1"), ask_client=authority.ca_file) as server:
        assert login(server.url("tls"), make, ssl_certfile=str(authority.client_file), **ca)
        with pytest.raises(StoreConnectionError):
            make(server.url("tls"), **ca).open(2)


def test_tls_before_the_first_word(make: Make, authority: Authority) -> None:
    pem = authority.server_file("127.0.0.1")
    config = f'tls {{ cert_file: "{pem}", key_file: "{pem}", handshake_first: true }}'
    with NatsServer(config=config) as server:
        assert login(server.url("tls"), make, ssl_ca_certs=str(authority.ca_file), tls_handshake_first=True)


def test_where_tls_is_allowed_it_is_used_when_demanded(make: Make, authority: Authority) -> None:
    pem = authority.server_file("127.0.0.1")
    config = f'tls {{ cert_file: "{pem}", key_file: "{pem}" }}\nallow_non_tls: true'
    with NatsServer(config=config) as server:
        assert login(server.url("tls"), make, ssl_ca_certs=str(authority.ca_file))
        assert [bool(client.get("tls_version")) for client in server.look("connz")["connections"]] == [True]


def test_a_server_without_tls_hears_nothing_of_a_login_that_demands_it(make: Make) -> None:
    """Somebody in between who hides the server's offer gets no password."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard: list[bytes] = []

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                client.sendall(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
                while data := client.recv(4096):
                    heard.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreConnectionError, match="has no TLS"):
            make(f"tls://jobs:hidden@127.0.0.1:{listening.getsockname()[1]}").open(1)
        thread.join(10)
        assert heard == []


# ---------------------------------------------------------------- forks and green worlds

def test_a_fork_leaves_the_parents_link_alone_and_makes_its_own(shared: NatsServer, make: Make) -> None:
    link, heard = make(shared.url()), Heard()
    listener = link.listen("t.fork", heard)
    echo(link, "t.fork.echo")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            told = [link.connected, link.epoch, len(link.on_connect)]
            link.open(5)
            own_ear = Heard()
            link.listen("t.fork.child", own_ear)
            link.post([Frame("t.fork", b"child"), Frame("t.fork.child", b"own")])
            told += [link.request(Frame("t.fork.echo", b"2"), 5).data, own_ear.data, link.epoch]
            os.write(writer, repr(told).encode())
            link.close()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as told:
        assert told.read() == repr([False, 0, 0, b"2", [b"own"], 1]).encode()
    os.waitpid(child, 0)
    assert link.request(NOBODY, 5).status == 503
    listener.drain_now(5)
    assert (heard.data, link.epoch) == ([b"child"], 1)


GREEN = """
import {world}
{patch}
import logging, sys, threading, time
logging.basicConfig(level=logging.DEBUG)
from streambroker.engines.jetstream.address import Address
from streambroker.engines.jetstream.link import Frame, Link
from streambroker.settings import Settings
link = Link(Address(sys.argv[1].replace("127.0.0.1", "localhost"), {{}}), Settings())
link.open(5)
beats = []
def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
link.listen("t.green", lambda reply: link.post([Frame(reply.reply, reply.data)]))
link.listen("t.silent", lambda reply: None)
wrong = []
def work(name):
    for number in range(30):
        text = b"%d %d" % (name, number)
        answers = [link.request(Frame("t.green", text), 5), *link.requests([Frame("t.green", text)] * 3, 5)]
        wrong.extend(answer for answer in answers if answer is None or answer.data != text)
threads = [threading.Thread(target=work, args=(name,)) for name in range(10)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not wrong, wrong
del beats[:]
link.requests([Frame("t.silent")], 1.0)
assert len(beats) > 20, len(beats)      # others ran while it waited
import asyncio
assert asyncio.run(asyncio.sleep(0, "fine")) == "fine"
# a loop that is never given back does not stop the link
received = []
link.listen("t.busy", received.append)
link.post([Frame("t.busy")])
end = time.monotonic() + 1
while time.monotonic() < end and not received:
    pass
assert received
link.close()
print("done")
"""


@pytest.mark.parametrize("world, patch", [
    ("gevent.monkey", "gevent.monkey.patch_all()"), ("eventlet", "eventlet.monkey_patch()"), ("threading", "")])
def test_green_worlds(shared: NatsServer, world: str, patch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(GREEN.format(world=world, patch=patch)), shared.url()],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr[-3000:]


# ---------------------------------------------------------------- helpers

def echo(link: Link, subject: str) -> None:
    """Have what comes on `subject` sent back."""
    link.listen(subject, lambda reply: link.post([Frame(reply.reply, reply.data)]) and None)


def run_threads(works: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
