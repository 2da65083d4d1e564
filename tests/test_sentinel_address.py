"""Where sentinels are, from URLs and options; what news of theirs does to connections."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection

from streambroker import connect
from streambroker.dramatiq import RedisStreamsBroker
from streambroker.engines.redis_streams.client import Address
from streambroker.engines.redis_streams.sentinel import SentinelAddress, read_sentinel
from streambroker.errors import ConfigurationError
from streambroker.kombu.conninfo import Endpoint

THREE = (("a", 26379), ("b", 26380), ("::1", 26379))


def address(url: str, **options: Any) -> SentinelAddress:
    return read_sentinel(url, {"master_name": "mine", **options})[0]


@pytest.mark.parametrize(("url", "options"), [
    ("sentinel-streams://a,b:26380,[::1]", {}),
    ("sentinel-streams://a:26379/0;sentinel-streams://b:26380;Sentinel-Streams://[::1]:26379", {}),
    ("sentinel-streams://a;b:26380;[::1]/", {}),
    ("sentinel-streams://a", {"sentinels": [("b", 26380), "[::1]:26379"]}),
    ("sentinel-streams://", {"sentinels": "a,sentinel-streams://b:26380,[::1],a"}),
])
def test_sentinels(url: str, options: dict[str, Any]) -> None:
    assert address(url, **options).sentinels == THREE


def test_login_and_database_are_those_of_the_primary() -> None:
    for url in ("sentinel-streams://me:p%2Cw@a,b:26380/3", "sentinel-streams://me:p%2Cw@a;sentinel-streams://b:26380/3"):
        found = address(url)
        assert (found.username, found.password, found.database) == ("me", "p,w", 3)
        assert "p,w" not in repr(found)
        assert "p%2Cw" not in str(found)
    assert address("sentinel-streams://a", username="me", password="pw", db=2).database == 2


def tls_of(found: SentinelAddress) -> list[tuple[bool, Any]]:
    """Of the primary and of the sentinels: whether, and whom they trust."""
    sentinels = Address("redis-streams://sentinel", found.sentinel_kwargs)
    return [(each.tls, each.extra.get("ssl_ca_certs")) for each in (found, sentinels)]


def test_tls() -> None:
    """An option is about the primary, as in Kombu; the scheme about both, whose hosts are the sentinels."""
    both, name = "sentinel-streams+rediss://a", "ssl_ca_certs"
    assert tls_of(address("sentinel-streams://a", ssl=True, ssl_ca_certs="/ca")) == [(True, "/ca"), (False, None)]
    assert tls_of(address("sentinel-streams://a", sentinel_kwargs={"ssl": True, name: "/ca"})) == [
        (False, None), (True, "/ca")]
    assert tls_of(address(both)) == [(True, None), (True, None)]
    assert tls_of(address(f"{both}?{name}=/ca")) == [(True, "/ca"), (True, "/ca")]
    assert tls_of(address(both, ssl_ca_certs="/ca", sentinel_kwargs={name: "/theirs"})) == [
        (True, "/ca"), (True, "/theirs")]
    assert tls_of(address(both, ssl_ca_certs="/ca", sentinel_kwargs={"ssl": False})) == [(True, "/ca"), (False, None)]
    assert address("sentinel-streams+rediss://a:26379/0;Sentinel-Streams+rediss://b:26380;[::1]").sentinels == THREE
    assert str(address(both)) == "sentinel-streams+rediss://a:26379/0 master mine"


def test_options_may_be_in_the_query() -> None:
    found, settings = read_sentinel("sentinel-streams://a/1?master_name=mine&min_other_sentinels=2&db=4&"
                                    "sentinel_kwargs=%7B%22password%22%3A%22pw%22%7D", {"prefix": "p"})
    assert (found.name, found.min_others, found.database, settings.prefix) == ("mine", 2, 4, "p")
    assert found.sentinel_kwargs == {"password": "pw"}


@pytest.mark.parametrize(("url", "options", "said"), [
    ("sentinel-streams://a", {"master_name": None}, "needs the option master_name"),
    ("sentinel-streams://a", {"host": "b"}, "option host: .* finds the primary by itself"),
    ("sentinel-streams://a", {"client": object()}, "option client: .* finds the primary by itself"),
    ("sentinel-streams://a:port", {}, "a sentinel is written host:port"),
    ("sentinel-streams://a", {"sentinels": [("a", "x")]}, "a sentinel is written host:port"),
    ("sentinel-streams://a/name", {}, "must be a number"),
    ("sentinel-streams://a", {"sentinel_kwargs": {"pasword": "x"}}, "unknown name 'pasword'; known: .*password"),
    ("sentinel-streams://a", {"sentinel_kwargs": "x=y"}, "as a text it is JSON"),
    ("sentinel-streams://a", {"sentinel_kwargs": 3}, "is a dict"),
    ("sentinel-streams://a", {"ssl_ca_certs": "/ca"}, "ssl_ca_certs without TLS: give ssl=True"),
    ("sentinel-streams://a", {"sentinel_kwargs": {"ssl_ca_certs": "/ca"}}, "without TLS: give sentinel_kwargs={'ssl'"),
    ("sentinel-streams://a", {"mastername": "x"}, "did you mean master_name"),
    ("redis-streams://a", {"master_name": "x"}, "unknown option 'master_name'"),
])
def test_what_cannot_be_used(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        connect(url, **{"master_name": "mine", **options})


def test_what_redis_py_knows_and_nobody_needs_is_left_out() -> None:
    assert address("sentinel-streams://a", sentinel_kwargs={
        "password": "pw", "decode_responses": True, "retry_on_timeout": True}).sentinel_kwargs == {"password": "pw"}


def test_the_urls_of_a_list_are_one_group_wherever_kombu_stands() -> None:
    connection = Connection(
        "sentinel-streams://me:pw@a/1;sentinel-streams://b:26380;sentinel-streams://[::1]:26379",
        transport_options={"master_name": "mine", "sentinel_kwargs": {"password": "other"}}, ssl={"ca_certs": "/ca"})
    first: Endpoint = connection.transport.endpoint()
    connection.maybe_switch_next()
    assert connection.transport.endpoint().key == first.key
    found, _ = read_sentinel(first.url, first.options)
    assert (found.sentinels, found.database, found.username, found.password) == (THREE, 1, "me", "pw")
    assert (found.tls, found.extra["ssl_ca_certs"]) == (True, "/ca")
    assert first.place == "sentinel-streams://a,b:26380,[::1]:26379/1"


@pytest.mark.parametrize("url", [
    "sentinel-streams+rediss://me:pw@a/1;sentinel-streams+rediss://b:26380;sentinel-streams+rediss://[::1]:26379",
    "sentinel-streams+rediss://me:pw@a,b:26380,[::1]/1?ssl_ca_certs=/ca"])
def test_the_scheme_with_tls_wherever_kombu_stands(url: str) -> None:
    connection = Connection(url, transport_options={"master_name": "mine"}, ssl={"ca_certs": "/ca"})
    first: Endpoint = connection.transport.endpoint()
    connection.maybe_switch_next()
    assert connection.transport.endpoint().key == first.key
    found, _ = read_sentinel(first.url, first.options)
    assert (found.sentinels, found.database, found.username, found.password) == (THREE, 1, "me", "pw")
    assert tls_of(found) == [(True, "/ca"), (True, "/ca")]


def test_one_url_of_kombus() -> None:
    connection = Connection("sentinel-streams://me:pw@h/2", transport_options={"master_name": "mine"})
    found, _ = read_sentinel(connection.transport.endpoint().url, {"master_name": "mine"})
    assert (found.sentinels, found.database, found.username, found.password) == ((("h", 26379),), 2, "me", "pw")


def test_dramatiq() -> None:
    for options in ({"sentinels": [("a", 26379), ("b", 26380)]}, {"url": "sentinel-streams://a,b:26380"},
                    {"url": "sentinel-streams+rediss://a,b:26380"}):
        broker = RedisStreamsBroker(master_name="mine", **options)  # type: ignore[arg-type]
        assert broker.engine.address.sentinels == THREE[:2]  # type: ignore[attr-defined]
        broker.close()
