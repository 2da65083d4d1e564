"""Adds pictures, the last of them urgent, and waits for all: `python add_pictures.py 30`."""

from __future__ import annotations

import sys

from app import ALBUM, broker, report, thumbnail

if __name__ == "__main__":
    count = int(sys.argv[1] if len(sys.argv) > 1 else 30)
    for number in range(count):
        thumbnail.send(f"picture-{number}.png")
    thumbnail.send("notes.txt")
    thumbnail.send_with_options(args=("urgent.png",), broker_priority=1)
    report.send_with_options(delay=2000)
    print(f"added {count} pictures, one that is none, and an urgent one", flush=True)
    broker.join("default", timeout=120_000)
    _, _, refused = broker.get_queue_message_counts("default")
    made = len(list(ALBUM.glob("*.small")))
    print(f"made {made} thumbnails; no pictures: {refused}, see `streambroker dead ls`")
    broker.close()
