"""What a Django project with django-dramatiq says; the parts that a test chooses are in SB_DJANGO."""

from __future__ import annotations

import json
import os

_given = json.loads(os.environ["SB_DJANGO"])

SECRET_KEY = "of no use"
USE_TZ = True
INSTALLED_APPS = ["django_dramatiq", "integration.apps.django_shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": _given["database"]}}
DRAMATIQ_BROKER = {
    "BROKER": _given["broker"],
    "OPTIONS": _given["options"],
    "MIDDLEWARE": [
        "dramatiq.middleware.AgeLimit",
        "dramatiq.middleware.TimeLimit",
        "dramatiq.middleware.Callbacks",
        "dramatiq.middleware.Pipelines",
        "dramatiq.middleware.CurrentMessage",
        "dramatiq.middleware.Retries",
        "django_dramatiq.middleware.AdminMiddleware",
        "django_dramatiq.middleware.DbConnectionsMiddleware",
    ],
}
DRAMATIQ_RESULT_BACKEND = {"BACKEND": _given["results"], "BACKEND_OPTIONS": _given["results_options"]}
