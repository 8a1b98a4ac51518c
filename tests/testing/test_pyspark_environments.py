"""Environments with another pyspark: what is in them, when they are made anew, and how a failure is told."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.testing.pyspark_environments import SEMEL_NEEDS, pyspark_python


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is empty, and a uv that writes down what it was asked for instead of fetching it."""
    monkeypatch.setenv("SEMEL_CACHE", str(tmp_path / "cache"))
    uv = tmp_path / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
        'for last in "$@"; do :; done\nif [ "$1" = venv ]; then mkdir -p "$last/bin"; fi\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "asked"


def test_the_other_environment_gets_all_that_semel_depends_on() -> None:
    """The list is that of pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sorted(SEMEL_NEEDS) == sorted(need.split(">=")[0] for need in project["dependencies"])


def test_versions_are_those_of_this_environment_unless_told_otherwise(asked: Path) -> None:
    """What is tested there differs in pyspark alone, and in what that pyspark needs."""
    pyspark_python("3.5.9", extras="connect", also=["pytest"], instead={"numpy": "1.26.4"})
    _, install = asked.read_text().splitlines()
    packages = install.split()
    assert {"pyspark[connect]==3.5.9", "numpy==1.26.4", f"pytest=={version('pytest')}"} <= set(packages)
    assert f"pyarrow=={version('pyarrow')}" in packages


def test_an_environment_is_made_once_and_anew_when_a_version_changes(asked: Path) -> None:
    """The folder's name has a digest of everything that is in it."""
    first = pyspark_python("4.0.5")
    assert pyspark_python("4.0.5") == first
    assert pyspark_python("4.0.5", instead={"pyarrow": "18.1.0"}) != first
    assert len(asked.read_text().splitlines()) == 4


def test_a_failure_is_told_with_the_installers_last_words(asked: Path) -> None:
    """Nothing is left in the cache that could pass for an environment."""
    (asked.parent / "uv").write_text("#!/bin/sh\necho no such version >&2\nexit 2\n")
    with pytest.raises(ConfigError, match=r"pyspark 9\.9\.9 could not be made(?s:.*)no such version"):
        pyspark_python("9.9.9")
    assert not [path for path in (asked.parent / "cache" / "pyspark").iterdir() if path.is_dir()]
