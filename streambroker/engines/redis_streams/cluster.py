"""Which node of a Redis Cluster serves which slot, and how to connect to it.

The map comes from CLUSTER SLOTS (Redis 6.2 has no SHARDS) of any node that answers. It is asked for again when a link
is opened, which is rare and, after the first time, a sign that something has changed. Replicas are never read from.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import redis
from redis.crc import key_slot

from ...errors import AuthenticationError, ConfigurationError, StoreConnectionError, StoreError
from ...settings import Settings
from .client import CLIENT_OPTIONS, Address, dialer
from .keys import Keys
from .link import Dial, Link
from .resp import ReplyError

logger = logging.getLogger(__name__)

SLOTS = 16384
#: a map that is no older is not asked for again
YOUNG = 0.2
#: longest wait (seconds) for one node's map: another one has it too
ASK_TIMEOUT = 1.0
#: how long (seconds) others are asked first after a node did not tell
AVOIDED = 10.0
#: an answer that takes longer (seconds) makes its user ask who serves what
SLOW = 1.0

#: what a node is asked for its map
ASK_MAP = ("CLUSTER", "SLOTS")

_REDIRECTION = re.compile(r"^(MOVED|ASK) (\d+) (.*):(\d+)$")


class Node(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class ClusterAddress(Address):
    """Start nodes of a cluster, and how to log in to all of its nodes. Raises ConfigurationError."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        first, *others = url.split(";")
        parts = urlsplit(first)
        login, at, hosts = parts.netloc.rpartition("@")
        host, *more = hosts.split(",")
        options = _like(options, hosts) if isinstance(options.get("client"), redis.RedisCluster) else dict(options)
        given = options.pop("startup_nodes", None) or ()
        nodes = [read_node(each) for each in (*more, *others, *([given] if isinstance(given, str) else given))]
        if nodes and not host and "host" not in options:
            options.update(host=nodes[0].host, port=nodes[0].port)
        scheme = "rediss" if "rediss" in parts.scheme else "redis"
        super().__init__(parts._replace(scheme=scheme, netloc=f"{login}{at}{host}").geturl(), options)
        if self.database or self.path:
            raise ConfigurationError("a cluster has database 0 only and no unix socket: cluster-streams://host:port; "
                                     "use the option prefix to keep applications apart")
        self.nodes = tuple(dict.fromkeys([Node(self.host, self.port), *nodes]))

    def at(self, node: Node) -> Address:
        """The address of one node."""
        address = copy.copy(self)
        address.host, address.port = node
        return address

    def __str__(self) -> str:
        return f"{'rediss' if self.tls else 'redis'} cluster at {', '.join(map(str, self.nodes))}"

    __repr__ = __str__


def is_cluster(url: str, options: Mapping[str, Any]) -> bool:
    return (url.lower().startswith("cluster-streams") or options.get("startup_nodes") is not None
            or isinstance(options.get("client"), redis.RedisCluster))


def _like(options: Mapping[str, Any], hosts: str) -> dict[str, Any]:
    """Nodes, login and TLS of a cluster's client of redis-py. It is looked at once, and neither used nor closed."""
    if len(options) > 1 or hosts:
        raise ConfigurationError("the option client says where the store is and how to log in: leave that out of the "
                                 "URL (cluster-streams://) and of the other options")
    client = options["client"]
    known = client.get_connection_kwargs()
    return {**{name: value for name, value in known.items() if name in CLIENT_OPTIONS and value is not None},
            "startup_nodes": [(node.host, node.port) for node in client.get_nodes()]}


def read_node(given: Any) -> Node:
    """`host:port`, a URL of it, (host, port), or what has these two as attributes. Raises ConfigurationError."""
    try:
        if isinstance(given, str):
            parts = urlsplit(given if "://" in given else f"//{given}")
            return Node(parts.hostname or "localhost", parts.port or 6379)
        host, port = given if isinstance(given, (tuple, list)) else (given.host, given.port)
        return Node(str(host), int(port))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"a start node of a cluster is host:port, not {given!r}") from error


class Cluster:
    """Thread-safe: the map is replaced as a whole, or one place of it."""

    def __init__(self, address: ClusterAddress, settings: Settings, keys: Keys) -> None:
        self._address = address
        self._settings = settings
        self._slots: list[Node | None] = [None] * SLOTS
        self._known: tuple[Node, ...] = ()
        self._masters: frozenset[Node | None] = frozenset()
        self._asked = float("-inf")
        #: when a node last did not tell
        self._failed: dict[Node, float] = {}
        #: slot of what belongs to no queue: workers, tables, subscriptions
        self.home = slot_of(keys.common)
        if slot_of(keys.root("a")) != slot_of(keys.bell("a")):
            raise ConfigurationError(f"option prefix: {keys.prefix!r} cannot be used in a cluster, {{}} would keep the "
                                     "keys of one queue apart")

    def node_of(self, slot: int) -> Node:
        """Raises StoreConnectionError when nobody is known to serve it."""
        node = self._slots[slot]
        if node is None:
            raise StoreConnectionError(f"no node of the cluster serves slot {slot}")
        return node

    def serves(self, node: Node | None, slot: int) -> bool:
        """By the last map."""
        return self._slots[slot] == node

    def is_replaced(self, node: Node, timeout: float | None = None) -> bool:
        """Whether others have its slots, by a map asked for now. False too when nobody tells."""
        try:
            self.renew(timeout)
        except StoreConnectionError as error:
            logger.debug("no new map of the cluster: %s", error)
            return False
        return node not in self._masters

    def link(self, node: Node, timeout: float | None = None) -> Link:
        """A new one, not open."""
        return Link(dialer(self._address.at(node), self._settings), self.timeout(timeout))

    def dial_home(self, timeout: float) -> redis.Connection:
        """As `Dial`: to the node of what belongs to no queue, whoever that is by now."""
        self.renew(timeout)
        dial: Dial = dialer(self._address.at(self.node_of(self.home)), self._settings)
        return dial(timeout)

    def moved(self, reply: ReplyError, asked: Node) -> None:
        """Learn from a node's MOVED."""
        found = redirection(reply, asked)
        if found is not None:
            slot, node = found
            self._slots[slot] = node

    def renew(self, timeout: float | None = None) -> None:
        """Ask for the map unless it is young. Raises StoreConnectionError when no node has one."""
        if time.monotonic() - self._asked < YOUNG:
            return
        known = [*self._known]
        # not always the same: it may be cut off from the others and not know it
        random.shuffle(known)
        known.sort(key=lambda node: time.monotonic() - self._failed.get(node, float("-inf")) < AVOIDED)
        trouble: Exception | None = None
        for node in dict.fromkeys([*known, *self._address.nodes]):
            link = self.link(node, min(ASK_TIMEOUT, self.timeout(timeout)))
            try:
                link.open()
                if self.learn(link.call(*ASK_MAP), node):
                    return
            except AuthenticationError:
                raise
            except (StoreConnectionError, StoreError) as error:
                self._failed[node] = time.monotonic()
                trouble = error
            finally:
                link.close()
        raise StoreConnectionError(f"no node of the cluster tells who serves what: {trouble or 'no slots are served'}")

    def learn(self, rows: Iterable[Any], asked: Node) -> bool:
        """Take a node's map; False when it has none."""
        slots: list[Node | None] = [None] * SLOTS
        known: dict[Node, None] = {}
        for start, end, *nodes in rows:
            found = [node for node in (_node(each, asked) for each in nodes) if node is not None]
            known.update(dict.fromkeys(found))
            master = _node(nodes[0], asked) if nodes else None
            slots[start:end + 1] = [master] * (end + 1 - start)
        if not known:
            return False
        self._slots, self._known, self._asked = slots, tuple(known), time.monotonic()
        self._masters = frozenset(slots)
        return True

    def timeout(self, timeout: float | None) -> float:
        """For an answer, when `timeout` is wished for."""
        return self._settings.socket_timeout if timeout is None else min(timeout, self._settings.socket_timeout)


def slot_of(key: str | bytes) -> int:
    data = key if isinstance(key, bytes) else key.encode("utf-8", "surrogateescape")
    slot: int = key_slot(data)
    return slot


def redirection(reply: ReplyError, asked: Node) -> tuple[int, Node] | None:
    """What MOVED or ASK says. A node that does not know its own name means the host that was asked."""
    found = _REDIRECTION.match(str(reply))
    return (int(found[2]), Node(found[3] or asked.host, int(found[4]))) if found else None


def _node(row: Any, asked: Node) -> Node | None:
    host = row[0].decode() if row[0] is not None else "?"
    return None if host == "?" else Node(host or asked.host, int(row[1]))
