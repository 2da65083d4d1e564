"""Asks for a report and waits for it: `python make_report.py 20`."""

from __future__ import annotations

import sys

from app import app, read_till, write_report
from celery import chord

if __name__ == "__main__":
    shops = range(1, int(sys.argv[1] if len(sys.argv) > 1 else 20) + 1)
    report = chord([read_till.s(shop) for shop in shops], write_report.s()).delay()
    print(f"reading {len(shops)} tills", flush=True)
    print(f"the report: {report.get(timeout=120)}")
    # the result stays for `result_expires`, whoever asks and however late
    print(f"once more, by its id: {app.AsyncResult(report.id).get(timeout=1)}")
