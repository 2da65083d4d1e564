"""A TCP proxy that fails on command, to put between a client and a real server.

    with Proxy(server.port) as proxy:
        client = connect(server.url(port=proxy.port))
        proxy.hold("down")                  # commands arrive, replies do not
        proxy.release()
        proxy.drop_reply(b"XADD")           # the next XADD is run by the server, its sender never hears of it

Directions: `up` is client to server, `down` is server to client, `both`. Methods may be called from any thread.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..embedded import free_port

#: what this process has done to stores, workers and their links, by kind; a report counts it
done: Counter[str] = Counter()

_CHUNK = 65536
_DIRECTIONS = {"up": ("up",), "down": ("down",), "both": ("up", "down")}


class Link:
    """One client's connection and its twin to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.sockets = {"up": client, "down": server}  # by the direction that they are read for
        self.frozen = False
        self.swallow = False
        self.broken = False
        self.tail = b""
        self.pumps = 2

    def end(self, *, reset: bool) -> None:
        """Make both pumps end. A reset must not be preceded by a FIN, so only reading is shut down then."""
        self.broken = True
        for end in self.sockets.values():
            try:
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
            except OSError:
                pass  # it is closed already


class Proxy:
    """Listens on a free port of 127.0.0.1 (`port`) and forwards to `target`, a port of 127.0.0.1 or (host, port)."""

    def __init__(self, target: int | tuple[str, int]) -> None:
        self.target = ("127.0.0.1", target) if isinstance(target, int) else target
        self._changed = threading.Condition()
        self._links: set[Link] = set()
        self._threads: set[threading.Thread] = set()
        self._held: set[str] = set()
        self._delay = {"up": 0.0, "down": 0.0}
        self._budget: dict[str, int] = {}
        self._refusing = False
        self._closed = False
        self._match = b""
        self._to_drop = 0
        self._dropped = 0
        self._accepted = 0
        self._listener = socket.create_server(("127.0.0.1", free_port()), backlog=512)
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    # faults

    def delay(self, seconds: float, direction: str = "both") -> None:
        """Hand each chunk on that much later; 0 ends it."""
        done["delay"] += bool(seconds)
        with self._changed:
            for way in _DIRECTIONS[direction]:
                self._delay[way] = seconds

    def hold(self, direction: str = "both") -> None:
        """Keep everything of that direction back, of old and new connections, until `release`: a link that hangs."""
        done["hold"] += 1
        with self._changed:
            self._held.update(_DIRECTIONS[direction])

    def freeze(self) -> int:
        """Freeze the connections that there are, for ever or until `release`: half-open, neither bytes nor their end
        get through. New ones work. How many."""
        done["freeze"] += 1
        with self._changed:
            for link in self._links:
                link.frozen = True
            return len(self._links)

    def release(self) -> None:
        """End `hold` and `freeze`; what was kept back arrives, in order."""
        with self._changed:
            self._held.clear()
            for link in self._links:
                link.frozen = False
            self._changed.notify_all()

    def refuse(self, on: bool = True) -> None:
        """Reset new connections at once, until `refuse(False)`."""
        done["refuse"] += on
        with self._changed:
            self._refusing = on

    def reset(self) -> int:
        """RST all connections; how many."""
        done["reset"] += 1
        return self._end_all(reset=True)

    def drop(self) -> int:
        """Close all connections in an orderly way (FIN); how many."""
        done["drop"] += 1
        return self._end_all(reset=False)

    def cut(self, after: int, direction: str = "down") -> None:
        """Let `after` more bytes of that direction pass, then reset the connection that sends the next one, in the
        middle of what it sends. Once."""
        with self._changed:
            for way in _DIRECTIONS[direction]:
                self._budget[way] = after

    def drop_reply(self, match: bytes, times: int = 1) -> None:
        """The next `times` connections that send `match` lose their replies from there on and are reset, after the
        server has run what it got."""
        with self._changed:
            self._match = match
            self._to_drop = times

    # what happened

    @property
    def connections(self) -> int:
        """Open now."""
        with self._changed:
            return len(self._links)

    @property
    def accepted(self) -> int:
        """Ever taken, refused ones excepted."""
        with self._changed:
            return self._accepted

    def wait_connections(self, count: int, timeout: float = 10.0) -> None:
        """Until at least `count` are open. AssertionError after `timeout` seconds."""
        self._wait(lambda: len(self._links) >= count, timeout, f"{count} connections")

    def wait_idle(self, timeout: float = 10.0) -> None:
        """Until none is open. AssertionError after `timeout` seconds."""
        self._wait(lambda: not self._links, timeout, "no connection")

    def wait_dropped(self, count: int = 1, timeout: float = 10.0) -> None:
        """Until `count` replies were dropped since the start. AssertionError after `timeout` seconds."""
        self._wait(lambda: self._dropped >= count, timeout, f"{count} dropped replies")

    def close(self) -> None:
        """End all connections and threads. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        # Linux: closing does not wake a blocked accept, a shutdown does; macOS: the other way round
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        self._end_all(reset=True)
        end = time.monotonic() + 5
        for thread in self._running():
            thread.join(max(0.0, end - time.monotonic()))
        self._end_all(reset=False)  # wakes what is blocked in a send to somebody who does not read
        for thread in self._running():
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # machinery

    def _wait(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, timeout):
                raise AssertionError(f"not within {timeout} s: {what} (open: {len(self._links)})")

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"proxy-{self.port}", daemon=True)
        with self._changed:
            self._threads.add(thread)
            thread.start()

    def _running(self) -> list[threading.Thread]:
        with self._changed:
            return list(self._threads)

    def _end_all(self, *, reset: bool) -> int:
        with self._changed:
            links = list(self._links)
        for link in links:
            link.end(reset=reset)
        return len(links)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                refusing = self._refusing
            try:
                server = None if refusing else socket.create_connection(self.target, 5)
            except OSError:
                server = None
            if server is None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server)
            with self._changed:
                self._links.add(link)
                self._accepted += 1
                self._changed.notify_all()
                if self._closed:
                    link.end(reset=True)
            self._spawn(self._pump, link, "up", client, server)
            self._spawn(self._pump, link, "down", server, client)

    def _pump(self, link: Link, way: str, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(_CHUNK):
                if not self._forward(link, way, data, sink):
                    break
            self._pass_gate(link, way)
            if link.swallow and way == "down":
                # the server has run everything and said goodbye
                link.end(reset=True)
                with self._changed:
                    self._dropped += 1
                    done["lost reply"] += 1
                    self._changed.notify_all()
            elif not link.broken:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            link.end(reset=True)
        self._leave(link)

    def _forward(self, link: Link, way: str, data: bytes, sink: socket.socket) -> bool:
        """False when the link is to end."""
        self._pass_gate(link, way)
        with self._changed:
            pause = self._delay[way]
        if pause:
            time.sleep(pause)
        if link.swallow:
            return way == "down"  # replies go nowhere, and nothing more is sent
        room = self._spend(way, len(data))
        if room < len(data):
            sink.sendall(data[:room])
            link.end(reset=True)
            return False
        matched = way == "up" and self._matches(link, data)
        if matched:
            link.swallow = True
        sink.sendall(data)
        return not matched  # the shutdown that follows makes the server run what it got, and close

    def _pass_gate(self, link: Link, way: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not (link.frozen or way in self._held))
            if self._closed:
                raise ConnectionAbortedError("the proxy was closed")

    def _spend(self, way: str, size: int) -> int:
        """How many of `size` bytes may pass."""
        with self._changed:
            left = self._budget.get(way)
            if left is None:
                return size
            if left < size:
                del self._budget[way]
                done["cut"] += 1
                return left
            self._budget[way] = left - size
            return size

    def _matches(self, link: Link, data: bytes) -> bool:
        with self._changed:
            if not self._to_drop:
                return False
            seen = link.tail + data
            if self._match in seen:
                self._to_drop -= 1
                return True
            link.tail = seen[-len(self._match):]
            return False

    def _leave(self, link: Link) -> None:
        with self._changed:
            link.pumps -= 1
            if not link.pumps:
                for end in link.sockets.values():
                    end.close()
                self._links.discard(link)
            self._threads.discard(threading.current_thread())
            self._changed.notify_all()
