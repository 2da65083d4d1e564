"""Options: names, bounds, kinds, suggestions."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from streambroker.errors import ConfigurationError
from streambroker.settings import IGNORED, JetStreamSettings, SentinelSettings, Settings, read_settings

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def test_defaults() -> None:
    settings = read_settings({})
    assert settings == Settings()
    assert (settings.visibility_timeout, settings.delivery_limit, settings.priority_order) == (30.0, 5, "redis")


@pytest.mark.parametrize(("kind", "name"), [
    (kind, field.name) for kind in (Settings, SentinelSettings, JetStreamSettings)
    for field in dataclasses.fields(kind)])
def test_every_option_is_explained(kind: type[Settings], name: str) -> None:
    meaning = {field.name: field for field in dataclasses.fields(kind)}[name].metadata["meaning"]
    assert meaning.endswith(".")
    assert meaning[0].isupper() or meaning[0] == "`"


@pytest.mark.parametrize("name", FIELDS)
def test_every_default_is_within_its_own_bounds(name: str) -> None:
    default = FIELDS[name].default
    assert getattr(read_settings({name: default}), name) == default


@pytest.mark.parametrize("name", FIELDS)
def test_none_is_the_default(name: str) -> None:
    expected = None if name == "delivery_limit" else FIELDS[name].default
    assert getattr(read_settings({name: None}), name) == expected


def test_a_number_is_taken_in_its_kind() -> None:
    settings = read_settings({"visibility_timeout": 60, "dead_letter_max_count": 5.0})
    assert (settings.visibility_timeout, type(settings.visibility_timeout)) == (60.0, float)
    assert (settings.dead_letter_max_count, type(settings.dead_letter_max_count)) == (5, int)


def test_alias() -> None:
    assert read_settings({"global_keyprefix": "mine"}).prefix == "mine"


def test_priority_steps_are_sorted_and_unique() -> None:
    assert read_settings({"priority_steps": [9, 0, 3, 3]}).priority_steps == (0, 3, 9)
    assert read_settings({"priority_steps": range(10)}).priority_steps == tuple(range(10))


@pytest.mark.parametrize("value", [True, 1, False, 0])
def test_switches(value: Any) -> None:
    assert read_settings({"proof_of_death": value}).proof_of_death is bool(value)


@pytest.mark.parametrize(("name", "value"), [
    ("visibility_timeout", 0.5), ("visibility_timeout", 86401), ("delivery_limit", -1), ("max_message_size", 0),
    ("publish_timeout", -0.1), ("block_timeout", 0), ("dead_letter_max_age", 0), ("socket_timeout", 601),
])
def test_out_of_bounds(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"option {name}.*out of bounds"):
        read_settings({name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["low"] is not None])
def test_the_lowest_value_is_allowed(name: str) -> None:
    low = FIELDS[name].metadata["low"]
    assert getattr(read_settings({name: low}), name) == low


@pytest.mark.parametrize(("name", "value"), [
    ("visibility_timeout", "soon"), ("visibility_timeout", True), ("visibility_timeout", []), ("prefix", 7),
    ("proof_of_death", "yes"), ("priority_steps", []), ("priority_steps", "abc"), ("priority_steps", 3),
    ("dead_letter_max_count", "many"), ("visibility_timeout", float("nan")), ("dead_letter_max_age", float("inf")),
    ("dead_letter_max_count", float("inf")),
])
def test_of_the_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"option {name}"):
        read_settings({name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.metadata["choices"]])
def test_choices(name: str) -> None:
    for choice in FIELDS[name].metadata["choices"]:
        assert getattr(read_settings({name: choice}), name) == choice
    with pytest.raises(ConfigurationError, match=FIELDS[name].metadata["choices"][0]):
        read_settings({name: "something else"})


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigurationError, match=r"'visibilty_timeout'; did you mean visibility_timeout\?"):
        read_settings({"visibilty_timeout": 5})


def test_an_unknown_name_that_resembles_nothing() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown option 'qqqq'$"):
        read_settings({"qqqq": 5})


def test_foreign_names_pass() -> None:
    assert read_settings({"max_retries": 3}, foreign=frozenset({"max_retries"})) == Settings()
    with pytest.raises(ConfigurationError):
        read_settings({"max_retries": 3})


@pytest.mark.parametrize("name", IGNORED)
def test_an_option_without_effect_is_said_and_not_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "streambroker.settings"):
        assert read_settings({name: object()}) == Settings()
    assert IGNORED[name] in caplog.text


def test_nothing_is_both_ignored_and_an_option() -> None:
    assert not set(IGNORED) & set(FIELDS)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().prefix = "x"  # type: ignore[misc]
