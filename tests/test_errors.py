"""The error tree: what users may catch."""

from __future__ import annotations

import pytest

from streambroker import errors


def all_errors() -> list[type[BaseException]]:
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BaseException)]


@pytest.mark.parametrize("error", all_errors())
def test_one_base(error: type[BaseException]) -> None:
    assert issubclass(error, errors.StreambrokerError)
    assert error.__doc__


@pytest.mark.parametrize(("error", "builtin"), [
    (errors.StoreConnectionError, ConnectionError), (errors.StoreUnavailable, ConnectionError),
    (errors.AuthenticationError, ConnectionError), (errors.Closed, ConnectionError),
    (errors.ConfigurationError, ValueError), (errors.MessageTooLarge, ValueError),
])
def test_the_builtin_that_says_the_same(error: type[BaseException], builtin: type[BaseException]) -> None:
    with pytest.raises(builtin, match="text"):
        raise error("text")


def test_a_refusal_is_no_broken_link() -> None:
    assert not issubclass(errors.StoreError, ConnectionError)
    assert not issubclass(errors.StoreConnectionError, errors.StoreError)
    assert issubclass(errors.MessageTooLarge, errors.StoreError)
    assert issubclass(errors.StoreUnavailable, errors.StoreConnectionError)
