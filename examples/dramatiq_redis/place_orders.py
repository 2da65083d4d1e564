"""Places orders and waits until nothing of them is left: `python place_orders.py 30`."""

from __future__ import annotations

import sys

from app import BOOKS, broker, charge, reserve, ship
from dramatiq import pipeline

if __name__ == "__main__":
    orders = range(1, int(sys.argv[1] if len(sys.argv) > 1 else 30) + 1)
    for order in orders:
        steps = [actor.message_with_options(args=(order,), pipe_ignore=True) for actor in (reserve, charge, ship)]
        pipeline(steps).run()
    print(f"placed {len(orders)} orders", flush=True)
    broker.join("default", timeout=120_000)
    _, _, refused = broker.get_queue_message_counts("default")
    shipped = len(list((BOOKS / "shipped").iterdir()))
    print(f"shipped {shipped} orders; refused cards: {refused}, see `streambroker dead ls`")
    broker.close()
