"""What can be said of the examples in the documents without running them. `make installs` runs them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from doc_examples import GIVEN, PAGES, ROOT, SETUPS, Example, all_examples, commands

PYTHON = all_examples("python")
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_every_page_with_fences_has_its_examples_found() -> None:
    """No example is missed because it is indented or fenced otherwise."""
    for page in PAGES:
        fences = len(re.findall(r"^\s*(```|~~~)", page.read_text(), re.MULTILINE))
        languages = ("python", "sh", "text", "sql", "toml", "json", "")
        found = sum(len([one for one in all_examples(language) if one.page == page]) for language in languages)
        assert fences == 2 * found, f"{page.name} has a block of another kind: use python, sh, sql, toml, json or text"
    assert PYTHON


@pytest.mark.parametrize("example", PYTHON, ids=lambda example: example.name)
def test_a_python_example_needs_no_name_that_nobody_defines(example: Example) -> None:
    """A reader can copy it. A fragment names its setup in a comment above it (see doc_examples.py)."""
    assert re.fullmatch(r"|continues|pytest|setup=\w+|tutorial", example.mark), example.mark
    before = PYTHON[: PYTHON.index(example)]
    program = example.program
    while example.continues:
        example = before.pop()
        program = f"{example.program}\n{program}"
    if example.setup is not None:
        program = "".join(f"{name} = None\n" for name in GIVEN) + program
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "-q", "--select", "F821,E9", "-"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    advice = "Define it, or put <!-- example: setup=NAME --> above the example, with tests/install/setups/NAME.py.txt."
    assert done.returncode == 0, f"{done.stdout}\n{advice}"


def test_every_setup_is_used() -> None:
    """None is left behind by an example that went."""
    used = {example.setup for language in ("python", "sh") for example in all_examples(language)}
    assert used - {None} == set(SETUPS.glob("*.py.txt"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_extras_that_a_page_names_exist(page: Path) -> None:
    """`pip install` warns of an unknown extra and installs nothing for it."""
    for named in re.findall(r"semel\[([\w,-]+)\]", page.read_text()):
        assert set(named.split(",")) <= EXTRAS


def test_the_commands_of_shell_examples_are_ours() -> None:
    """Only what the install tests know how to run."""
    for example in [one for one in all_examples("sh") if not one.is_step]:
        for words in commands(example):
            assert words[0] in ("semel", "make", "pip", "python", ".ci/run") or "=" in words[0], words
