"""A shop's orders: reserve the goods, charge the card, send the parcel, ask for a review some seconds later.

Ordinary Dramatiq actors. What is streambroker's: the broker.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq

from streambroker.dramatiq import RedisStreamsBroker

broker = RedisStreamsBroker(url=os.environ.get("SHOP_BROKER", "redis://127.0.0.1:6379/0"))
dramatiq.set_broker(broker)

BOOKS = Path(os.environ.get("SHOP_BOOKS", "books"))
REVIEW_AFTER = int(os.environ.get("SHOP_REVIEW_AFTER", "5000"))


class CardRefused(Exception):
    """Trying again changes nothing."""


def book(kind: str, order: int) -> bool:
    """Note in the books that `kind` happened to the order; False when it was there already."""
    (BOOKS / kind).mkdir(parents=True, exist_ok=True)
    try:
        (BOOKS / kind / str(order)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@dramatiq.actor
def reserve(order: int) -> None:
    time.sleep(0.2)
    book("reserved", order)


@dramatiq.actor(min_backoff=1000, throws=(CardRefused,))
def charge(order: int) -> None:
    """Charges once, however often it runs: the order is the key under which the bank remembers the charge."""
    if order % 13 == 0:
        raise CardRefused(f"order {order}: the card is refused")
    if order % 5 == 0 and book("timed-out", order):
        raise TimeoutError("the bank does not answer")
    time.sleep(0.5)
    book("charged", order)


@dramatiq.actor
def ship(order: int) -> None:
    time.sleep(0.3)
    book("shipped", order)
    ask_for_review.send_with_options(args=(order,), delay=REVIEW_AFTER)


@dramatiq.actor
def ask_for_review(order: int) -> None:
    book("asked", order)
