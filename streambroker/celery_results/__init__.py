"""Celery's results on NATS JetStream: `result_backend = "jetstream://host:4222"`.

Found by Celery through the entry points in the group `celery.result_backends`.
"""

from __future__ import annotations
