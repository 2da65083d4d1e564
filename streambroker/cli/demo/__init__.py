"""`streambroker demo`: the main job, shown. Jobs are published, a worker is killed in the middle, and all ran.

The store, two workers of Celery or Dramatiq, the publisher and the ledger are real and separate processes or files;
only the ledger, which tasks write to by themselves, decides what ran.
"""

from __future__ import annotations

from .command import add

__all__ = ["add"]
