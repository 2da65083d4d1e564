"""`connect(url, **options)`: the engine for a URL."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .engine import Engine

REDIS_SCHEMES = frozenset({
    "redis", "rediss", "unix", "valkey", "valkeys", "redis-streams", "rediss-streams", "valkey-streams",
    "redis-streams+unix", "redis-streams+socket", "sentinel-streams", "sentinel-streams+rediss", "cluster-streams",
    "cluster-streams+redis", "cluster-streams+rediss"})

JETSTREAM_SCHEMES = frozenset({"jetstream", "jetstream-tls", "nats", "tls"})


def connect(url: str, **options: Any) -> Engine:
    """An engine for `url`; `options` are those of `streambroker.settings` and of the store's client.

    Connects at first use. Raises ConfigurationError for an unknown scheme, option or value, or when the client package
    of that store is not installed.
    """
    scheme = urlsplit(url.partition(";")[0]).scheme.lower()
    if scheme in REDIS_SCHEMES:
        try:
            from .engines.redis_streams.engine import RedisStreamsEngine
        except ImportError as error:
            raise ConfigurationError(
                f"{scheme}:// needs the redis package: pip install 'streambroker[redis]'") from error
        return RedisStreamsEngine.from_url(url, **options)
    if scheme in JETSTREAM_SCHEMES:
        try:
            from .engines.jetstream.engine import JetStreamEngine
        except ImportError as error:
            raise ConfigurationError(
                f"{scheme}:// needs the nats-py package: pip install 'streambroker[jetstream]'") from error
        return JetStreamEngine.from_url(url, **options)
    if scheme == "memory":
        from .engines.memory import MemoryEngine

        return MemoryEngine.from_url(url, **options)
    known = ("known: redis-streams, rediss-streams, valkey-streams, sentinel-streams, cluster-streams, jetstream, "
             "jetstream-tls")
    if "://" not in url:
        raise ConfigurationError("the URL has no scheme: it is written redis-streams://host:6379/0 or "
                                 f"jetstream://host:4222; {known}")
    near = difflib.get_close_matches(scheme, sorted(REDIS_SCHEMES | JETSTREAM_SCHEMES), n=1)
    hint = f"did you mean {near[0]}://? " if near else ""
    raise ConfigurationError(f"no engine for {scheme}://; {hint}{known}")
