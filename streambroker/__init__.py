"""Background jobs that are never lost, for Celery and Dramatiq, on Redis Streams and NATS JetStream.

Importing this package makes its URL schemes known to Kombu. Kombu imports it by itself, through the entry point in its
`kombu.serializers` group, while Kombu is half imported and in every program on a machine that uses Celery. So this is a
single module, since finding one costs more than running it; it imports no client library and no framework, and never
raises.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

__version__ = "0.1.0"
__all__ = [
    "DeadLetter", "Delivery", "Message", "QueueSpec", "QueueStats", "StreambrokerError", "__version__", "connect"]

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from .connection import connect
    from .errors import StreambrokerError
    from .message import DeadLetter, Delivery, Message, QueueSpec, QueueStats

_HOME = {"connect": "connection", "StreambrokerError": "errors", "DeadLetter": "message", "Delivery": "message",
         "Message": "message", "QueueSpec": "message", "QueueStats": "message"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "kombu":
        return import_module(".kombu", __name__)
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: URL scheme to where its transport is; Kombu imports it when the scheme is used
TRANSPORTS = {
    "redis-streams": "streambroker.kombu.transport:RedisStreamsTransport",
    "rediss-streams": "streambroker.kombu.transport:RedisStreamsTransport",
    "valkey-streams": "streambroker.kombu.transport:RedisStreamsTransport",
    "cluster-streams": "streambroker.kombu.cluster:ClusterStreamsTransport",
    "sentinel-streams": "streambroker.kombu.transport:SentinelStreamsTransport",
    # as Kombu reads the later URLs of a list; of the first it takes the part before the plus
    "cluster-streams+rediss": "streambroker.kombu.cluster:ClusterStreamsTransport",
    "sentinel-streams+rediss": "streambroker.kombu.transport:SentinelStreamsTransport",
    "jetstream": "streambroker.kombu.transport:JetStreamTransport",
    "jetstream-tls": "streambroker.kombu.transport:JetStreamTransport",
    "streambroker-memory": "streambroker.kombu.transport:MemoryTransport",
}
_TABLE = "kombu.transport"


def register() -> None:
    """Make the schemes known, now or as soon as `kombu.transport` is imported. May be called any number of times."""
    try:
        if _TABLE in sys.modules:
            _add(sys.modules[_TABLE])
        elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watch())
    except Exception:  # noqa: BLE001  an exception here breaks `import celery` for every program on this machine
        return


def _add(module: ModuleType) -> None:
    known: dict[str, Any] | None = getattr(module, "TRANSPORT_ALIASES", None)
    if known is not None:
        for scheme, place in TRANSPORTS.items():
            known.setdefault(scheme, place)


class _Watch:
    """Waits in `sys.meta_path` for the import of `kombu.transport`, once."""

    def find_spec(self, name: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        from importlib.machinery import PathFinder

        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == _TABLE:
                    _add(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _refuse(data: object) -> NoReturn:
    raise ValueError("'streambroker' is no serializer: this entry only makes URL schemes known; use json")


#: what the entry point loads to: (encoder, decoder, content type, content encoding)
serializer = (_refuse, _refuse, "application/x-streambroker-none", "utf-8")

register()
