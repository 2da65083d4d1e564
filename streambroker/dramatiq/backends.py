"""What the backends on JetStream share: their store of values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..settings import JetStreamSettings
from .options import engine_options

if TYPE_CHECKING:
    from ..results.store import ResultStore

DEFAULT_URL = "nats://localhost:4222"
#: how long values live in a stream whose server knows no time of a single value, unless longer is asked for (seconds)
LIFE = 600.0


def open_store(url: str, options: dict[str, Any]) -> ResultStore:
    """The store of this process for that place and these options, which are JetStreamBroker's. Connects at first use.
    Raises ConfigurationError."""
    try:
        from ..results.store import shared
    except ImportError as error:
        raise ConfigurationError("this backend needs the nats-py package: pip install 'streambroker[jetstream]'"
                                 ) from error
    return shared(url, engine_options(options, JetStreamSettings, None), expires=LIFE, max_age=LIFE)
