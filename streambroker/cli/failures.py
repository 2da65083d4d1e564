"""How a command ends: exit codes, errors that say what to do, and texts without secrets."""

from __future__ import annotations

import re

from ..errors import StreambrokerError

OK = 0
#: it failed, or what was asked for is not there
FAILED = 1
#: the command line cannot be used as it stands
USAGE = 2
INTERRUPTED = 130

_USERINFO = re.compile(r"(?<=://)[^\s/?#]*@")
_SECRET_QUERY = re.compile(r"(?i)([?&][^=&\s]*(?:password|passwd|secret|token|credential|seed|kwargs)[^=&\s]*=)[^&\s]*")


class CommandError(StreambrokerError):
    """Ends the command with `code`; the text goes to the user and says what to do."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


def masked(text: str) -> str:
    """`text` with the user part and secret parameters of each URL in it hidden."""
    return _SECRET_QUERY.sub(r"\1***", _USERINFO.sub("***@", text))
