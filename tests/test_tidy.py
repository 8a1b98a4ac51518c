"""The source itself, read as text: which package may import which, and whether the documents are true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "semel"
# Inside out: a package imports only from itself and from packages before it.
ORDER = [
    "errors",
    "private_files",
    "processes",
    "pem_files",
    "charts",
    "logs",
    "traces",
    "metrics",
    "observe",
    "wire",
    "records",
    "core",
    "broker",
    "client",
    "session",
    "spark",
    "bridges",
    "testing",
    "verify",
    "advise",
    "inspect",
    "bench",
    "demo",
    "web",
    "cli",
]
PURE = ["wire", "records", "core"]
IMPURE_MODULES = {
    "asyncio",
    "os",
    "pathlib",
    "select",
    "selectors",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
}
FILES = sorted(SOURCE.rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_packages_import_only_from_those_before_them(file: Path) -> None:
    """Design, section 2: the core can be tested by the million because it knows nothing of what is around it."""
    package = package_of(file)
    if package == "__init__":
        return
    allowed = set(ORDER[: ORDER.index(package) + 1])
    used = {name.split(".")[1] for name in imports(file) if name.startswith("semel.")}
    assert used <= allowed, f"{package} may not import {sorted(used - allowed)}"


@pytest.mark.parametrize(
    "file", [file for file in FILES if package_of(file) in PURE], ids=lambda file: str(file.relative_to(SOURCE))
)
def test_the_pure_packages_know_no_clock_no_socket_no_file_and_no_thread(file: Path) -> None:
    """They take values and return values."""
    assert not {name.split(".")[0] for name in imports(file)} & IMPURE_MODULES


def test_the_file_map_names_every_file() -> None:
    """A newcomer finds each file in docs/design.md, and no file that is gone."""
    design = (ROOT / "docs" / "design.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", design, re.MULTILINE))
    present = {str(file.relative_to(SOURCE)) for file in FILES if file.name != "__init__.py"}
    assert listed == present


def test_every_requirement_has_a_line_and_every_named_test_exists() -> None:
    """docs/guarantees.md promises only what a test proves; "not yet" is a legal answer, silence is not."""
    lines = re.findall(r"^\| ([A-J]\d) \|(.*)\|$", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)
    counts = {"A": 8, "B": 9, "C": 5, "D": 9, "E": 8, "F": 6, "G": 5, "H": 4, "I": 5, "J": 5}
    assert [name for name, _ in lines] == [f"{part}{n}" for part, count in counts.items() for n in range(1, count + 1)]
    for name, text in lines:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
        assert tests or "not yet" in text, f"{name} names no test"
        for file, function in tests:
            assert re.search(rf"def {function}\b", (ROOT / "tests" / file).read_text()), f"{name}: {file}::{function}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_and_make_targets_in_the_documents_exist(document: Path) -> None:
    """No command that is not there, no link into nothing."""
    text = document.read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, re.MULTILINE)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / link).exists(), link
