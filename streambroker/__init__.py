"""Background jobs that are never lost, for Celery and Dramatiq, on Redis Streams and NATS JetStream.

Importing this package registers the URL schemes with Kombu if Kombu is there, and imports no client library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "DeadLetter", "Delivery", "Message", "QueueSpec", "QueueStats", "StreambrokerError", "__version__", "connect"]

if TYPE_CHECKING:
    from .connection import connect
    from .errors import StreambrokerError
    from .message import DeadLetter, Delivery, Message, QueueSpec, QueueStats

_HOME = {"connect": "connection", "StreambrokerError": "errors", "DeadLetter": "message", "Delivery": "message",
         "Message": "message", "QueueSpec": "message", "QueueStats": "message"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    from .kombu.register import register

    register()


_register()
