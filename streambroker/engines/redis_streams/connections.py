"""How an engine connects: to one server, or to the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...chores import Chores
from ...settings import Settings, read_settings
from .client import CLIENT_OPTIONS, Address
from .cluster import Cluster, ClusterAddress, is_cluster
from .clusterpull import ClusterPull
from .commands import Commands
from .keys import Keys
from .link import Link
from .primary import dialing
from .pull import Pull
from .router import Router
from .sentinel import SCHEME, TLS_SCHEME, read_sentinel

if TYPE_CHECKING:
    from .consumer import RedisConsumer
    from .engine import RedisStreamsEngine


def read_address(url: str, options: Mapping[str, Any]) -> tuple[Address, Settings]:
    """What a URL and options say, of any kind. Raises ConfigurationError."""
    if url.lower().startswith((f"{SCHEME}:", f"{TLS_SCHEME}:")):
        return read_sentinel(url, options)
    client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
    address = ClusterAddress(url, client) if is_cluster(url, client) else Address(url, client)
    return address, read_settings({name: value for name, value in options.items() if name not in client})


def _nothing() -> None:
    return None


class Connections:
    """Makes what has connections, none of it open. `close` ends the watch over where to connect to."""

    def __init__(self, address: Address, settings: Settings, chores: Callable[[], Chores]) -> None:
        self._timeout = settings.socket_timeout
        self.keys = Keys(settings.prefix, address.database, guarded=isinstance(address, ClusterAddress))
        self._cluster = Cluster(address, settings, self.keys) if isinstance(address, ClusterAddress) else None
        self._dial, self.close = (self._cluster.dial_home, _nothing) if self._cluster else dialing(
            address, settings, chores)

    def link(self, timeout: float | None = None) -> Link:
        """To the server; in a cluster to the node of what belongs to no queue, whoever that is when it opens."""
        return Link(self._dial, self._timeout if timeout is None else min(timeout, self._timeout))

    def commands(self, patience: float, timeout: float | None = None) -> Commands:
        cluster = self._cluster
        return Commands(lambda: Router(cluster, timeout) if cluster else self.link(timeout), patience)

    def pull(self, engine: RedisStreamsEngine, consumer: RedisConsumer) -> Pull | ClusterPull:
        return ClusterPull(engine, self._cluster, consumer) if self._cluster else Pull(engine, consumer)
