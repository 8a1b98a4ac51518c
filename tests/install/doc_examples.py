"""The examples of README.md and docs/, as readers see them.

A Python example runs as it is, in a program of its own, unless a comment above it says otherwise:

    <!-- example: setup=NAME -->    a fragment: setups/NAME.py.txt runs before it, and its `check()` after it
    <!-- example: continues -->     it goes on where the example before it ended
    <!-- example: pytest -->        it is a test module
    <!-- example: tutorial -->      a step of a tutorial, which test_tutorial.py follows from its first to its last

Commands in `sh` examples are run too; `make` targets are checked by test_tidy.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SETUPS: Final = Path(__file__).parent / "setups"
PAGES: Final = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
GIVEN: Final = ("bootstrap", "folder", "stop_when")
"""What the runner puts into a setup's namespace."""
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK: Final = re.compile(r"<!-- example: (.*?) -->\s*\Z")


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def setup(self) -> Path | None:
        return SETUPS / f"{self.mark.removeprefix('setup=')}.py.txt" if self.mark.startswith("setup=") else None

    @property
    def continues(self) -> bool:
        return self.mark == "continues"

    @property
    def is_step(self) -> bool:
        return self.mark == "tutorial"

    @property
    def is_test(self) -> bool:
        return self.mark == "pytest"

    @property
    def program(self) -> str:
        """What runs: the setup's code too."""
        return (self.setup.read_text() + "\n" if self.setup is not None else "") + self.code


def examples(page: Path) -> list[Example]:
    text = page.read_text()
    found: list[Example] = []
    for block in _FENCE.finditer(text):
        before = text[: block.start()]
        mark = _MARK.search(before)
        found.append(Example(page, before.count("\n") + 1, block[1], block[2], mark[1] if mark else ""))
    return found


def all_examples(language: str) -> list[Example]:
    return [example for page in PAGES for example in examples(page) if example.language == language]


def commands(example: Example) -> Iterator[list[str]]:
    """The words of each command of a shell example; comments and line continuations are the shell's."""
    for line in example.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words
