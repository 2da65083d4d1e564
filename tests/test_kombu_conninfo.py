"""From a broker URL to the engine's URL and options."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
from kombu import Connection

from streambroker.errors import ConfigurationError
from streambroker.kombu.conninfo import Endpoint


def endpoint(url: Any, **arguments: Any) -> Endpoint:
    found: Endpoint = Connection(url, **arguments).transport.endpoint()
    return found


@pytest.mark.parametrize(("url", "engine"), [
    ("redis-streams://", "redis-streams://localhost:6379/0"),
    ("redis-streams://h", "redis-streams://h:6379/0"),
    ("Redis-Streams://h:6380/3", "redis-streams://h:6380/3"),
    ("valkey-streams://h/1", "redis-streams://h:6379/1"),
    ("redis-streams://:p%40ss%2F@h/1", "redis-streams://:p%40ss%2F@h:6379/1"),
    ("redis-streams://user:pw@h/1", "redis-streams://user:pw@h:6379/1"),
    ("redis-streams://[::1]:6380/1", "redis-streams://[::1]:6380/1"),
    ("rediss-streams://h/1", "rediss-streams://h:6379/1"),
    ("redis-streams+unix:///run/redis.sock", "redis-streams+unix:///run/redis.sock"),
    ("redis-streams+socket:///run/redis.sock?virtual_host=2", "redis-streams+socket:///run/redis.sock?db=2"),
    ("redis-streams+rediss://u:pw@h:6380/1", "rediss-streams://u:pw@h:6380/1"),
    ("redis-streams+redis://h/1", "redis-streams://h/1"),
])
def test_urls(url: str, engine: str) -> None:
    assert endpoint(url).url == engine


@pytest.mark.parametrize("url", ["redis-streams://h/name", "redis-streams+http://h/1"])
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigurationError):
        endpoint(url)


def test_tls_options_come_from_the_url_or_from_broker_use_ssl() -> None:
    found = endpoint("rediss-streams://h/1?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required")
    assert found.options["ssl_ca_certs"] == "/ca.pem"
    assert found.options["ssl_cert_reqs"] == ssl.CERT_REQUIRED
    found = endpoint("redis-streams://h/1", ssl={"ssl_cert_reqs": ssl.CERT_NONE, "ca_certs": "/ca.pem"})
    assert found.url.startswith("rediss-streams://")
    assert (found.options["ssl_cert_reqs"], found.options["ssl_ca_certs"]) == (ssl.CERT_NONE, "/ca.pem")
    assert endpoint("redis-streams://h/1", ssl=True).url.startswith("rediss-streams://")
    assert "ssl_cert_reqs" not in endpoint("rediss-streams://h/1").options


def test_a_list_of_urls_fails_over(caplog: Any) -> None:
    connection = Connection("redis-streams://a/1;rediss-streams://b/2")
    assert connection.transport.endpoint().url == "redis-streams://a:6379/1"
    connection.maybe_switch_next()
    assert connection.transport.endpoint().url == "rediss-streams://b:6379/2"


def test_options_of_kombus_redis_transport_and_of_kombu_itself() -> None:
    found = endpoint("redis-streams://h/1", transport_options={
        "visibility_timeout": 60, "global_keyprefix": "app", "unacked_key": "u", "max_retries": 3, "interval_start": 0,
        "socket_timeout": 7, "socket_keepalive_options": {1: 2}, "revoke_waiting": False})
    assert found.options == {
        "visibility_timeout": 60, "global_keyprefix": "app", "unacked_key": "u", "socket_timeout": 7,
        "socket_keepalive_options": {1: 2}, "socket_connect_timeout": 5}
    assert found.adapter.revoke_waiting is False


def test_the_connect_timeout_of_kombu_is_kept() -> None:
    assert endpoint("redis-streams://h/1", connect_timeout=2).options["socket_connect_timeout"] == 2
    assert endpoint("redis-streams://h/1", connect_timeout=2, transport_options={"socket_connect_timeout": 9}).options[
        "socket_connect_timeout"] == 9
    assert "socket_connect_timeout" not in endpoint("redis-streams://h/1", connect_timeout=None).options


def test_secrets_are_not_shown() -> None:
    found = endpoint("redis-streams://user:secret@h/1", transport_options={"password": "hidden"})
    assert "secret" not in repr(found)
    assert "hidden" not in repr(found)
    assert "secret" not in repr(Connection("redis-streams://user:secret@h/1"))
