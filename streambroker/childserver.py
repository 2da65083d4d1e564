"""A server as a child process that never outlives its parent."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from .errors import StoreUnavailable

logger = logging.getLogger(__name__)

#: below the ephemeral ports: a client that retries a closed ephemeral port may connect to itself
_PORTS = range(20000, 30000)
#: reads until the parent is gone, however it went, then ends the server (a stopped one too) and what it started
_WATCHER = 'read -r _; kill -TERM "$1"; kill -CONT "$1"; sleep 10; kill -KILL -- "-$1"'


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

    def freeze(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

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
