"""A provider of credentials as a user writes one: the password is in a file and may change any time."""

from __future__ import annotations

import os
from pathlib import Path

from redis.credentials import CredentialProvider

#: environment variable with the file's path; the file holds `user password`
VARIABLE = "STREAMBROKER_CREDENTIALS"


class FileCredentials(CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        user, password = Path(os.environ[VARIABLE]).read_text().split()
        return user, password


def user() -> str:
    """The same as functions."""
    return FileCredentials().get_credentials()[0]


def password() -> str:
    return FileCredentials().get_credentials()[1]
