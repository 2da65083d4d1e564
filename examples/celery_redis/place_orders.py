"""Places orders and waits until they are shipped: `python place_orders.py 30`."""

from __future__ import annotations

import sys

from app import charge, reserve, ship
from celery import chain

if __name__ == "__main__":
    orders = range(1, int(sys.argv[1] if len(sys.argv) > 1 else 30) + 1)
    results = {order: chain(reserve.si(order), charge.si(order), ship.si(order)).delay() for order in orders}
    print(f"placed {len(results)} orders", flush=True)
    refused = [order for order in orders if order % 13 == 0]
    shipped = [results[order].get(timeout=120) for order in orders if order not in refused]
    print(f"shipped {len(shipped)} orders; refused cards: {refused}, see `streambroker dead ls`")
