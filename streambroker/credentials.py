"""Logins that change: a provider is asked for each connection anew."""

from __future__ import annotations

import importlib
from typing import Any

from .errors import ConfigurationError


def load_provider(given: Any) -> Any:
    """A provider of credentials, as redis-py has it: `get_credentials()` gives (user, password), or (password,) alone.
    In its place the dotted path of its class (`package.module.Class`), as Kombu takes it too. Raises
    ConfigurationError."""
    if not isinstance(given, str):
        return given
    module, _, name = given.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"credential_provider {given!r} is not the path of a class (package.module.Class): "
                                 f"{error}") from error
