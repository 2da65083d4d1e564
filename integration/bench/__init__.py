"""Speed of Celery on our transport against Kombu's Redis transport, side by side: `python -m integration.bench`."""
