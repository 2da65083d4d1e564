"""README says what is so: commands, options, names of tests, names in code.

`python -m tests.test_readme` writes the tables of options anew.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streambroker.cli.entry import build_parser
from streambroker.kombu.conninfo import KombuOptions
from streambroker.settings import IGNORED, JetStreamSettings, SentinelSettings, Settings
from streambroker.testing.conformance import suite

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = [line.split("  #")[0].strip() for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


def options_table(kind: Any) -> str:
    """The options of a dataclass of options, as README shows them; its own ones where it adds to `Settings`."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    inherited = {field.name for field in dataclasses.fields(Settings)} if kind is not Settings else set()
    for field in dataclasses.fields(kind):
        if field.name in inherited:
            continue
        told = field.metadata
        names = " or ".join(f"`{name}`" for name in (field.name, *told.get("aliases", ())))
        default = "`\"\"`" if field.default == "" else f"`{field.default}`"
        unit = f" {told['unit']}" if told.get("unit") else ""
        rows.append(f"| {names} | {default}{unit} | {told['meaning']}{_bounds(told)} |")
    return "\n".join(rows)


def _bounds(told: Any) -> str:
    low, high = told.get("low"), told.get("high")
    if low is None:
        return ""
    return f" At least {low}." if high is None else f" {low} to {high}."


def defined_in(path: Path) -> set[str]:
    """`function`, `Class` and `Class::method` of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def marks_of(path: Path, name: str) -> str:
    """What marks a test: the source of the decorators of it and of its class, and of `pytestmark`."""
    home, _, inner = name.partition("::")
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            found.append(ast.unparse(node.value))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == home:
            found += map(ast.unparse, node.decorator_list)
            if isinstance(node, ast.ClassDef):
                found += [ast.unparse(each) for function in node.body if isinstance(function, ast.FunctionDef)
                          and function.name == inner for each in function.decorator_list]
    return "\n".join(found)


def stores_of(path: str, name: str) -> set[str]:
    """The stores that a test runs on by default."""
    if path.startswith("streambroker/testing/conformance/"):
        return {"redis", "nats"} if name.partition("::")[0] in suite.__all__ else set()
    marks = marks_of(ROOT / path, name)
    if re.search(r"^pytest\.mark\.long$", marks, re.MULTILINE):
        return set()
    if "mark.stores" in marks:
        return {"redis", "nats"}
    return {"nats"} if "only_on('nats'" in marks or re.search(r"test_(breaker_)?(jetstream|nats)", path) else {"redis"}


def named_in(text: str) -> list[tuple[str, str]]:
    """(file, name) of each, which must be there."""
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)
    for path, name in named:
        assert name in defined_in(ROOT / path), f"{path}::{name}"
    return named


def test_the_first_command_is_one_line():
    assert "pip install '.[embedded]' && streambroker demo" in SHELL


def test_ci_runs_the_second_command():
    (command,) = re.findall(r'^test_command="(.*)"$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert command in SHELL
    assert command.startswith("pip install '.[dev]' && pytest")


@pytest.mark.parametrize("kind", [Settings, SentinelSettings, JetStreamSettings, KombuOptions])
def test_the_tables_of_options_are_those_of_the_code(kind):
    assert options_table(kind) in README


def test_options_without_effect_are_named():
    missing = [name for name in IGNORED if f"`{name}`" not in README]
    assert missing == []


def test_every_row_of_the_guarantees_names_a_test_that_is_there():
    section = README.split("## What is promised")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 12
    for row in rows:
        assert named_in(row), row


def test_every_promise_has_its_faults_on_both_stores():
    section = README.split("\n## Proof")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d+\. ", line)]
    assert [row[0].partition(".")[0] for row in rows] == [str(number) for number in range(1, 13)]
    for promise, seam, *frameworks in rows:
        assert len(frameworks) == 2, promise
        for cell in (seam, *(cell for cell in frameworks if cell != "the seam")):
            stores = set().union(*(stores_of(path, name) for path, name in named_in(cell)))
            assert stores == {"redis", "nats"}, (promise, cell)


@pytest.mark.parametrize("line", sorted({line for line in SHELL if line.startswith("streambroker ")}))
def test_commands_are_understood(line):
    arguments = shlex.split(line)[1:]
    assert callable(build_parser().parse_args(arguments).run)


@pytest.mark.parametrize("block", [block for kind, block in BLOCKS if kind == "python"])
def test_code_runs(block):
    subprocess.run([sys.executable, "-c", block], cwd=ROOT, check=True, timeout=60)


def test_sections_that_are_linked_are_there():
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    there = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]*)\)", README)) <= there


def test_the_contents_name_every_section():
    contents = README.split("\n## ")[0]
    assert [title for title in re.findall(r"^## (.*)$", README, re.MULTILINE) if f"[{title}](#" not in contents] == []


def test_files_that_are_linked_are_there():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


if __name__ == "__main__":
    tables = iter([options_table(Settings), options_table(KombuOptions)])
    text = re.sub(r"^\| option \|.*\n(\|.*\n)*", lambda found: next(tables) + "\n", README, flags=re.MULTILINE)
    (ROOT / "README.md").write_text(text)
