"""Results of actors on NATS JetStream, beside any broker.

    from dramatiq.results import Results
    from streambroker.dramatiq.results import JetStreamBackend

    broker.add_middleware(Results(backend=JetStreamBackend(url="nats://localhost:4222")))
"""

from __future__ import annotations

from typing import Any

from dramatiq import Encoder, Message
from dramatiq.results.backend import DEFAULT_TIMEOUT, ResultBackend
from dramatiq.results.errors import ResultMissing, ResultTimeout

from ..errors import MessageTooLarge
from .backends import DEFAULT_URL, open_store

#: how long a worker tries to store a result while the store is away, with its message unacknowledged (seconds)
PATIENCE = 120.0


class JetStreamBackend(ResultBackend):
    """Each result is a subject of its own. Thread-safe, greenlet-safe; in a forked child it connects anew.

    `get_result(block=True)` polls nothing and serves who comes late too. Results that are too large for the server are
    replaced by that error. Options are those of JetStreamBroker. Raises ConfigurationError; where the store cannot be
    reached, StoreConnectionError, which a wait does only for a refused login: the rest ends in ResultTimeout.
    """

    def __init__(self, *, url: str = DEFAULT_URL, namespace: str = "dramatiq-results", encoder: Encoder | None = None,
                 use_namespace_prefix_keys: bool = False, **options: Any) -> None:
        super().__init__(namespace=namespace, encoder=encoder, use_namespace_prefix_keys=use_namespace_prefix_keys)
        self.store = open_store(url, options)

    def get_result(self, message: Message[Any], *, block: bool = False, timeout: int | None = None) -> Any:
        """`timeout` is ms, 10 000 by default. Raises ResultMissing, ResultTimeout, ResultFailure."""
        key = self.build_message_key(message)
        if block:
            found = self.store.wait(key, (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000)
            if found is None:
                raise ResultTimeout(message)
        else:
            found = self.store.get(key, patience=self.store.settings.reconnect_timeout)
            if found is None:
                raise ResultMissing(message)
        return self.unwrap_result(self.encoder.decode(found.value))  # type: ignore[no-untyped-call]

    def store_result(self, message: Message[Any], result: Any, ttl: int) -> None:
        try:
            super().store_result(message, result, ttl)
        except MessageTooLarge as error:
            # whoever waits would do so in vain
            self.store_exception(message, error, ttl)
            raise

    def _store(self, message_key: str, result: Any, ttl: int) -> None:
        self.store.put(message_key, self.encoder.encode(result), expires=ttl / 1000, patience=PATIENCE)
