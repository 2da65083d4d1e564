"""Found by django-dramatiq by this module's name."""

from __future__ import annotations

import dramatiq
from dramatiq.middleware import CurrentMessage


@dramatiq.actor(store_results=True, min_backoff=10, max_backoff=10)
def ship(order: int) -> int:
    """Fails the first time."""
    message = CurrentMessage.get_current_message()
    if message is None or not message.options.get("retries"):
        raise ConnectionError("no van")
    return order * 2
