"""Start nodes and logins of a cluster, from URLs and options; no server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection

import streambroker
from streambroker.dramatiq import RedisStreamsBroker
from streambroker.engines.redis_streams.cluster import ClusterAddress, Node, redirection, slot_of
from streambroker.engines.redis_streams.keys import Keys
from streambroker.engines.redis_streams.resp import ReplyError, pack
from streambroker.engines.redis_streams.router import key_of, split
from streambroker.errors import ConfigurationError

A, B, C = Node("a", 7000), Node("b", 7001), Node("c", 6379)


@pytest.mark.parametrize(("url", "options", "nodes"), [
    ("cluster-streams://a:7000", {}, [A]),
    ("cluster-streams://a:7000;b:7001;c", {}, [A, B, C]),
    ("cluster-streams://a:7000;cluster-streams://b:7001/0", {}, [A, B]),
    ("cluster-streams://a:7000", {"startup_nodes": ["b:7001", ("c", 6379)]}, [A, B, C]),
    ("cluster-streams://", {"startup_nodes": "b:7001"}, [B]),
    ("cluster-streams://u:p%40ss@a:7000;b:7001", {}, [A, B]),
    ("cluster-streams://u:p%2C@a:7000,b:7001,c", {}, [A, B, C]),
    ("redis://a:7000", {"startup_nodes": [B]}, [A, B]),
])
def test_start_nodes(url: str, options: dict[str, Any], nodes: list[Node]) -> None:
    assert list(ClusterAddress(url, options).nodes) == nodes


def test_login_and_encryption_are_the_same_for_all_nodes() -> None:
    address = ClusterAddress("cluster-streams+rediss://u:p%40ss@a:7000;b:7001", {})
    at = address.at(B)
    assert (at.host, at.port, at.username, at.password, at.tls) == ("b", 7001, "u", "p@ss", True)
    assert str(address) == "rediss cluster at a:7000, b:7001"
    assert ClusterAddress("cluster-streams://a", {"ssl": True}).tls


@pytest.mark.parametrize("url", ["cluster-streams://a/1", "cluster-streams://a;b:port", "cluster-streams://a?db=2"])
def test_what_no_cluster_has_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        ClusterAddress(url, {})


@pytest.mark.parametrize("url", ["cluster-streams://a:7000;b:7001", "cluster-streams+rediss://a:7000;b:7001"])
def test_connect_and_dramatiq_know_the_scheme(url: str) -> None:
    engine = streambroker.connect(url)
    assert "cluster at a:7000, b:7001" in repr(engine)
    engine.close()
    broker = RedisStreamsBroker(url=url)
    assert "cluster at a:7000, b:7001" in repr(broker.engine)
    broker.close()


def test_kombu_may_go_to_the_next_url_with_tls() -> None:
    connection = Connection("cluster-streams+rediss://a:7000;cluster-streams+rediss://b:7001")
    first = connection.transport.endpoint()
    connection.maybe_switch_next()
    connection.maybe_switch_next()
    assert connection.transport.endpoint().url == first.url


def test_a_prefix_that_keeps_the_keys_of_a_queue_apart_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="prefix"):
        streambroker.connect("cluster-streams://a", prefix="{}x")
    streambroker.connect("cluster-streams://a", prefix="{app}").close()


@pytest.fixture
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    with Connection(request.param) as connection:
        yield connection


@pytest.mark.parametrize(("connection", "url", "more"), [
    ("cluster-streams://a:7000", "cluster-streams://a:7000", ()),
    ("cluster-streams://u:p%40@a:7000;b:7001;c", "cluster-streams://u:p%40@a:7000", ("b:7001", "c")),
    ("cluster-streams://a:7000;cluster-streams://u:p@b:7001//", "cluster-streams://a:7000", ("b:7001//",)),
    ("cluster-streams+rediss://a:7000;b:7001", "cluster-streams+rediss://a:7000", ("b:7001",)),
], indirect=["connection"])
def test_kombu_hands_the_whole_list_on(connection: Connection, url: str, more: tuple[str, ...]) -> None:
    found = connection.transport.endpoint()
    assert found.url.removesuffix("/0") == url
    assert tuple(found.options.get("startup_nodes", ())) == more
    connection.maybe_switch_next()
    assert connection.transport.endpoint() == found
    streambroker.connect(found.url, **found.options).close()


def test_keys_of_a_queue_share_a_slot() -> None:
    keys = Keys("sb", guarded=True)
    for queue in ("celery", "{a}b", "a}b", "", "@", "ü b"):
        assert {slot_of(key) for key in (
            keys.stream(queue, 0), keys.bell(queue), keys.delay(queue), keys.dead(queue), keys.producer(queue, "x"),
            *keys.whole(queue))} == {slot_of(keys.root(queue))}
    assert {slot_of(key) for key in (*keys.guard, keys.timers, keys.owned("q"))} == {slot_of(keys.common)}


def test_the_key_of_a_command_is_found() -> None:
    commands = [pack("EVALSHA", "0" * 40, 2, "{a}1", "{a}2", b"\r\n*1\r\n"), pack("XINFO", "GROUPS", "{b}"),
                pack("GET", "{c}")]
    assert [key_of(command) for command in commands] == [b"{a}1", b"{b}", b"{c}"]
    assert [command for command, _ in split(b"".join(commands))] == commands


def test_redirections() -> None:
    assert redirection(ReplyError("MOVED 3999 10.0.0.1:6381"), A) == (3999, Node("10.0.0.1", 6381))
    assert redirection(ReplyError("ASK 7 ::1:6381"), A) == (7, Node("::1", 6381))
    assert redirection(ReplyError("MOVED 7 :6381"), A) == (7, Node("a", 6381))
    assert redirection(ReplyError("ERR moved"), A) is None
