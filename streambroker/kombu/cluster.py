"""A Redis Cluster as a broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .conninfo import Endpoint, redis_endpoint
from .transport import RedisStreamsTransport

if TYPE_CHECKING:
    from kombu import Connection


class ClusterStreamsTransport(RedisStreamsTransport):
    """`cluster-streams://host:port;host:port`, `cluster-streams+rediss://...` (TLS)."""

    def endpoint(self) -> Endpoint:
        return cluster_endpoint(self.client)


def cluster_endpoint(connection: Connection) -> Endpoint:
    """Endpoint of the Redis Streams engine on a cluster. The URLs of a failover list are start nodes, and the first
    says who logs in: the engine goes from one to the next by itself. Raises ConfigurationError."""
    plain = redis_endpoint(connection)
    scheme, _, place = plain.url.partition("://")
    options = dict(plain.options)
    if connection.alt:
        first, *others = connection.alt
        scheme, _, place = first.rpartition("://")
        options["startup_nodes"] = (*(other.rpartition("://")[2].rpartition("@")[2] for other in others),
                                    *(options.get("startup_nodes") or ()))
    secure = "rediss" in scheme or bool(connection.ssl)
    return Endpoint(f"cluster-streams{'+rediss' if secure else ''}://{place}", options, plain.adapter)
