"""A shop's orders: reserve the goods, charge the card, send the parcel, ask for a review some seconds later.

An ordinary Celery application. What is streambroker's: the broker URL and the line with DURABLE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery
from celery.exceptions import Reject

from streambroker.kombu import DURABLE

app = Celery("shop", broker=os.environ.get("SHOP_BROKER", "redis-streams://127.0.0.1:6379/0"),
             backend=os.environ.get("SHOP_RESULTS", "redis://127.0.0.1:6379/1"))
# A task is acknowledged when it is done, not when it starts: what a crash interrupts runs again elsewhere.
app.conf.update(DURABLE)

BOOKS = Path(os.environ.get("SHOP_BOOKS", "books"))
REVIEW_AFTER = float(os.environ.get("SHOP_REVIEW_AFTER", "5"))


def book(kind: str, order: int) -> bool:
    """Note in the books that `kind` happened to the order; False when it was there already."""
    (BOOKS / kind).mkdir(parents=True, exist_ok=True)
    try:
        (BOOKS / kind / str(order)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@app.task
def reserve(order: int) -> None:
    time.sleep(0.2)
    book("reserved", order)


@app.task(autoretry_for=(TimeoutError,), retry_backoff=1, retry_jitter=False)
def charge(order: int) -> None:
    """Charges once, however often it runs: the order is the key under which the bank remembers the charge."""
    if order % 13 == 0:
        raise Reject(f"order {order}: the card is refused", requeue=False)
    if order % 5 == 0 and book("timed-out", order):
        raise TimeoutError("the bank does not answer")
    time.sleep(0.5)
    book("charged", order)


@app.task
def ship(order: int) -> int:
    time.sleep(0.3)
    book("shipped", order)
    ask_for_review.apply_async((order,), countdown=REVIEW_AFTER)
    return order


@app.task
def ask_for_review(order: int) -> None:
    book("asked", order)
