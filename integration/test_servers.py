"""The test kit itself: servers, their base size, TLS in front of them."""

from __future__ import annotations

import pytest
import redis

from streambroker.errors import ConfigurationError
from streambroker.testing.servers import RedisServer, available_kinds, required_kinds, server_binary
from streambroker.testing.tls import Authority, TlsFront


def test_every_kind_is_what_it_is_called(every_kind, every_server):
    expected = {"valkey": "valkey ", "redis": "redis ", "redis62": "redis 6.2.", "redis82": "redis 8.2."}
    assert every_server.version().startswith(expected.get(every_kind, ""))


def test_a_missing_server_is_an_error_that_says_what_to_do(monkeypatch):
    with pytest.raises(ConfigurationError, match="STREAMBROKER_SERVER_REDIS74"):
        server_binary("redis74")
    monkeypatch.setenv("STREAMBROKER_SERVER_REDIS74", "/somewhere/redis-server")
    assert str(server_binary("redis74")) == "/somewhere/redis-server"
    assert "redis74" in available_kinds()
    assert set(required_kinds()) <= set(available_kinds())


def test_base_shows_what_is_new_and_what_grew(fresh):
    server = fresh()
    with server.client() as client, client.pubsub() as listener, server.client(db=3) as other:
        empty = server.base()
        client.xadd("jobs", {"m": "1"})
        client.xgroup_create("jobs", "sb", "0")
        client.xreadgroup("sb", "me", {"jobs": ">"})
        other.rpush("list", "1", "2")
        listener.subscribe("news")
        listener.get_message(timeout=5)
        assert empty.difference(server.base()) == [
            "db 0 jobs: absent -> stream of 1; sb: 1 pending, 1 consumers", "db 3 list: absent -> list of 2",
            "channels with listeners: 0 -> 1"]
        full = server.base("j*")
        client.xadd("jobs", {"m": "2"})
        assert full.difference(server.base("j*")) == [
            "db 0 jobs: stream of 1; sb: 1 pending, 1 consumers -> stream of 2; sb: 1 pending, 1 consumers"]
        assert full.difference(server.base("j*"), ignore=["job*"]) == []


def test_freeze_kill_and_start_again(fresh):
    server = fresh(fsync="always", password="secret", unix_socket=True)
    with server.client() as client, server.client(socket_timeout=0.2) as impatient:
        client.set("kept", "1")
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            impatient.get("kept")
        server.thaw()
        server.restart(hard=True)
    with server.client() as client, redis.Redis(unix_socket_path=str(server.socket_path), password="secret") as local:
        assert client.get("kept") == local.get("kept") == b"1"
    assert server.url() == f"redis-streams://:secret@127.0.0.1:{server.port}/0"


def test_a_replica_follows(fresh):
    primary = fresh()
    with primary.client() as client, fresh(replica_of=primary).client() as copy:
        client.set("a", "1")
        client.wait(1, 10_000)
        assert copy.get("a") == b"1"


def test_tls_front_is_verified_both_ways(valkey: RedisServer, tmp_path):
    authority = Authority(tmp_path)
    trusting = {"ssl": True, "ssl_ca_certs": str(authority.ca_file), "ssl_check_hostname": True}
    with TlsFront(valkey.port, authority) as front, TlsFront(valkey.port, authority, name="other.example") as wrong, \
            TlsFront(valkey.port, authority, ask_client=True) as strict:
        with valkey.client(port=front.port, **trusting) as client:
            assert client.echo("x" * 200_000) == b"x" * 200_000
        known = {**trusting, "ssl_certfile": str(authority.client_file), "ssl_keyfile": str(authority.client_file)}
        with valkey.client(port=strict.port, **known) as client:
            assert client.ping()
        for port, options in ((front.port, {"ssl": True}), (wrong.port, trusting), (strict.port, trusting)):
            with valkey.client(port=port, **options) as client, pytest.raises(redis.ConnectionError):
                client.ping()
