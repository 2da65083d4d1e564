"""The embedded nats-server: durable, one a directory, gone with its parent; and `serve jetstream`."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streambroker.embedded import EmbeddedNats, answers_info
from streambroker.engines.jetstream.address import Address
from streambroker.engines.jetstream.link import Frame, Link
from streambroker.errors import ConfigurationError, StoreUnavailable
from streambroker.settings import Settings

STREAM = {"name": "JOBS", "subjects": ["jobs"], "retention": "workqueue", "storage": "file"}


def store(url: str, count: int) -> int:
    """Publish so many messages; how many there are then."""
    link = Link(Address(url, {}), Settings())
    try:
        link.request(Frame("$JS.API.STREAM.CREATE.JOBS", json.dumps(STREAM).encode()), 5)
        assert all(reply and reply.status == 0 for reply in link.requests([Frame("jobs", b"x")] * count, 5))
        told = json.loads(link.request(Frame("$JS.API.STREAM.INFO.JOBS"), 5).data)
        return int(told["state"]["messages"])
    finally:
        link.close()


def test_what_was_written_survives_stop_and_start(tmp_path: Path) -> None:
    for size in (3, 6):
        with EmbeddedNats(tmp_path / "data") as server:
            assert server.url == server.result_url == f"jetstream://127.0.0.1:{server.port}"
            assert store(server.url, 3) == size
        assert not answers_info(("127.0.0.1", server.port))


@pytest.mark.parametrize("fsync, interval", [("always", "always"), ("everysec", "1s")])
def test_every_write_is_synced_unless_told_otherwise(tmp_path: Path, fsync: str, interval: str) -> None:
    with EmbeddedNats(tmp_path, fsync=fsync) as server:
        assert f"sync_interval: {interval}" in server.configuration.read_text()
    with pytest.raises(ConfigurationError, match="everysec, always"):
        EmbeddedNats(tmp_path, fsync="never")


def test_messages_of_8_mib_fit(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path) as server:
        link = Link(Address(server.url, {}), Settings())
        link.open(5)
        assert link.max_payload == 8 * 1024 * 1024
        link.close()


def test_one_server_a_directory(tmp_path: Path) -> None:
    with EmbeddedNats(tmp_path) as first:
        configured = first.configuration.read_text()
        with pytest.raises(ConfigurationError, match="belongs to a running server"):
            EmbeddedNats(tmp_path).start()
        assert first.configuration.read_text() == configured
        with pytest.raises(ConfigurationError, match=f"port {first.port} is in use"):
            EmbeddedNats(tmp_path / "other", port=first.port).start()
        assert answers_info(("127.0.0.1", first.port))


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("in its way")
    with pytest.raises(StoreUnavailable, match=r"did not start: (.|\n)*storage directory"):
        EmbeddedNats(tmp_path).start()


@contextlib.contextmanager
def serve(*argv: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """(process, what it tells) of a `serve jetstream` that serves; ended afterwards."""
    process = subprocess.Popen([sys.executable, "-u", "-m", "streambroker", "serve", "jetstream", *argv],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()
        yield process, json.loads("".join(lines))
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_jetstream_is_durable_and_ends_cleanly(number: int, tmp_path: Path) -> None:
    for size in (2, 4):
        with serve("--dir", str(tmp_path / "data"), "--port", "0", "--json") as (process, told):
            assert store(told["url"], 2) == size
            process.send_signal(number)
            _, error = process.communicate(timeout=20)
            assert (process.returncode, error) == (0, "")
            assert not answers_info(("127.0.0.1", int(told["url"].rpartition(":")[2])))


def test_serve_jetstream_says_what_is_in_its_way(tmp_path: Path) -> None:
    with serve("--dir", str(tmp_path / "data"), "--port", "0", "--json") as (_, told):
        done = subprocess.run([sys.executable, "-m", "streambroker", "serve", "jetstream", "--dir", tmp_path / "other",
                               "--port", told["url"].rpartition(":")[2]], capture_output=True, text=True, timeout=30)
        assert (done.returncode, "is in use" in done.stderr) == (2, True)
