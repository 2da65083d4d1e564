"""The links of one user to the nodes of a cluster, behind the face of a single link: each command goes to the node that
serves its key.

Commands run one after the other, also where they go to different nodes: the next one is sent when the one before it is
answered. So a redirected command is never overtaken by a later one, which a producer's sequence relies on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ...errors import StoreConnectionError
from .cluster import SLOW, Cluster, Node, redirection, slot_of
from .link import UNAVAILABLE, Link
from .resp import ReplyError, pack

#: commands without a key, and what is for subscribers: from another node it would reach them later
_AT_HOME = frozenset({b"INFO", b"PUBLISH"})
#: commands whose key is not the word behind them
_KEY_AT = {b"EVALSHA": 3, b"XINFO": 2}


class Router:
    """One user at a time, as a `Link`. After any StoreConnectionError it is closed."""

    def __init__(self, cluster: Cluster, timeout: float | None) -> None:
        self._cluster = cluster
        self._timeout = timeout
        self._opening = timeout
        self._links: dict[Node, Link] = {}
        #: what is being answered
        self._under_way: tuple[Node, bytes] | None = None
        self._arrived: deque[Any] = deque()
        #: who answered last: it is the one that lacks a script
        self._last: Node | None = None
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self, timeout: float | None = None) -> None:
        """Know who serves what; nodes are connected to when a command is for them. Raises StoreConnectionError,
        AuthenticationError."""
        self._opening = timeout
        self._cluster.renew(timeout)
        self._open = True

    def send(self, data: bytes) -> None:
        """Send commands; of several all but the last are answered when this returns."""
        if not self._open:
            raise StoreConnectionError("not connected")
        try:
            for command, words in split(data):
                if self._under_way is not None:
                    reply = self._receive(None)
                    self._arrived.append(reply)
                    if _is_refusal(reply):
                        # whoever reads it sends all again
                        return
                self._dispatch(command, self._node_for(words))
        except BaseException:
            self.close()
            raise

    def read(self, timeout: float | None = None) -> Any:
        """The next answer, in the order of the commands; ReplyError is returned, not raised."""
        if self._arrived:
            return self._arrived.popleft()
        try:
            return self._receive(timeout)
        except StoreConnectionError:
            self.close()
            raise

    def _node_for(self, words: list[bytes]) -> Node:
        if words[0] == b"SCRIPT" and self._last is not None:
            return self._last
        if words[0] in _AT_HOME:
            return self._cluster.node_of(self._cluster.home)
        return self._cluster.node_of(slot_of(words[_KEY_AT.get(words[0], 1)]))

    def _dispatch(self, command: bytes, node: Node) -> None:
        self._to(node).send(command)
        self._under_way = node, command

    def _to(self, node: Node) -> Link:
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = self._cluster.link(node, self._timeout)
        if not link.is_open:
            link.open(self._opening)
        return link

    def _receive(self, timeout: float | None) -> Any:
        if self._under_way is None:
            raise StoreConnectionError("nothing was asked")
        node, command = self._under_way
        reply = self._answer_of(node, timeout)
        self._under_way, self._last = None, node
        if isinstance(reply, ReplyError):
            if str(reply).startswith("MOVED "):
                self._cluster.moved(reply, node)
            elif str(reply).startswith("ASK "):
                reply = self._ask(reply, node, command, timeout)
        return reply

    def _answer_of(self, node: Node, timeout: float | None) -> Any:
        """A machine that died says nothing: when another one has its slots it is not waited for."""
        link, since = self._links[node], time.monotonic()
        timeout = self._cluster.timeout(self._timeout if timeout is None else timeout)
        while (reply := link.read(min(SLOW, timeout), waits_on=True)) is False:
            if self._cluster.is_replaced(node, timeout):
                raise StoreConnectionError(f"another node has the slots of {node}")
            if time.monotonic() - since >= timeout:
                raise StoreConnectionError("no answer in time")
        return reply

    def _ask(self, reply: ReplyError, node: Node, command: bytes, timeout: float | None) -> Any:
        """The slot is on its way to another node, and what the command is about may be there."""
        found = redirection(reply, node)
        if found is None:
            return reply
        target = found[1]
        link = self._to(target)
        link.send(pack("ASKING") + command)
        link.read(timeout)
        self._last = target
        return link.read(timeout)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._reset()

    def _reset(self) -> None:
        self._links = {}
        self._under_way = None
        self._arrived.clear()
        self._open = False

    def interrupt(self) -> None:
        """End a read that waits in another thread."""
        for link in [*self._links.values()]:
            link.interrupt()

    def abandon(self) -> None:
        """Forget the sockets without a word on them: for the child of a fork."""
        for link in self._links.values():
            link.abandon()
        self._reset()


def split(data: bytes) -> Iterator[tuple[bytes, list[bytes]]]:
    """Packed commands, each with its first words, as many as it takes to find the key."""
    start = 0
    while start < len(data):
        line = data.index(b"\r\n", start)
        words, position = [], line + 2
        for number in range(int(data[start + 1:line])):
            line = data.index(b"\r\n", position)
            word = line + 2
            position = word + int(data[position + 1:line]) + 2
            if number < 4:
                words.append(data[word:position - 2])
        yield data if start == 0 and position == len(data) else data[start:position], words
        start = position


def key_of(command: bytes) -> bytes:
    """The first key of one packed command that has one."""
    [(_, words)] = split(command)
    return words[_KEY_AT.get(words[0], 1)]


def _is_refusal(reply: Any) -> bool:
    word = str(reply).split(" ", 1)[0] if isinstance(reply, ReplyError) else ""
    return word in UNAVAILABLE or word == "NOSCRIPT"
