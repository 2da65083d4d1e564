"""How Kombu learns the URL schemes, by the name that belongs to this adapter; it is done by the package itself."""

from __future__ import annotations

from .. import TRANSPORTS, register, serializer

__all__ = ["TRANSPORTS", "register", "serializer"]
