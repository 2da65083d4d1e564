"""Every error that streambroker raises. Foreign errors are translated at an engine's boundary, the cause is kept."""

from __future__ import annotations


class StreambrokerError(Exception):
    """Base of all."""


class ConfigurationError(StreambrokerError, ValueError):
    """An option or a URL cannot be used; the text says which and what would."""


class StoreError(StreambrokerError):
    """The store answered, and refused: wrong key type, missing permission, a script that failed."""


class MessageTooLarge(StoreError, ValueError):
    """The message is over the limit; nothing was sent."""


class StoreConnectionError(StreambrokerError, ConnectionError):
    """The store cannot be reached, or the link broke in the middle."""


class StoreUnavailable(StoreConnectionError):
    """The store is there but takes no work now: loading, demoted, out of memory, no quorum."""


class AuthenticationError(StoreConnectionError):
    """The store refused the credentials, or one side the other's certificate: trying again changes nothing."""


class Closed(StreambrokerError, ConnectionError):
    """The engine or consumer was closed, or belongs to the parent process of a fork."""
