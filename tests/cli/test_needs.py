"""Commands that need more than Semel itself say so before they start anything."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semel.cli import needs
from semel.cli.bench import NEEDS
from semel.cli.main import app


def run(*arguments: str) -> str:
    """What the command prints: one line, with status 1."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    assert done.output.count("\n") == 1, done.output
    return done.output


@pytest.mark.parametrize("says", [None, """echo 'openjdk version "11.0.2" 2019-01-15' >&2"""], ids=["none", "too old"])
@pytest.mark.parametrize("where", ["PATH", "JAVA_HOME"])
@pytest.mark.parametrize("command", [["demo"], ["bench", "session"]], ids=" ".join)
def test_a_missing_java_is_reported_at_once(
    command: list[str], says: str | None, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java 11 counts as missing; JAVA_HOME comes before the path, as for Spark."""
    (tmp_path / "bin").mkdir()
    if says is not None:
        (tmp_path / "bin" / "java").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "bin" / "java").chmod(0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if where == "PATH":
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    else:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "Java 17 or newer is missing. Install it: apt-get install openjdk-17" in run(*command)


@pytest.mark.parametrize(
    ("module", "command", "says"),
    [
        ("pyspark", ["demo"], "pyspark 4.2 or newer is missing. Install it: pip install 'semel[spark]'\n"),
        ("pandas", ["demo"], "pandas 2.2 or newer, before 3, is missing. Install it: pip install 'semel[spark]'"),
        ("pandas", ["bench", "spark"], "pandas 2.2 or newer, before 3, is missing."),
        (
            "confluent_kafka",
            ["bench", "session"],
            "confluent-kafka is missing. Install it: pip install 'semel[clients]'",
        ),
        ("aiokafka", ["bench"], "aiokafka is missing. Install it: pip install 'semel[clients]'"),
    ],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(
    module: str, command: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback, and no minutes of waiting for a pipeline that cannot run."""
    monkeypatch.setitem(sys.modules, module, None)
    assert says in run(*command)


@pytest.mark.parametrize(
    ("name", "found", "says"),
    [
        ("pandas", "3.0.1", "pandas 2.2 or newer, before 3, is needed, and 3.0.1 is installed."),
        ("pandas", "2.1.4", "and 2.1.4 is installed. Install it: pip install 'semel[spark]' 'pandas>=2.2,<3'"),
        ("pyspark", "4.0.5", "pyspark 4.2 or newer is needed, and 4.0.5 is installed."),
    ],
)
def test_a_version_that_does_not_work_is_reported(
    name: str, found: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PySpark warns of pandas 3 or fails in its workers; the demo's source needs pyspark 4.2."""
    monkeypatch.setattr("semel.cli.needs.version", lambda asked: found if asked == name else version(asked))
    assert says in run("demo")


@pytest.mark.parametrize("command", ["verify", "guarantees"])
@pytest.mark.parametrize(
    ("client", "module"), [("confluent-kafka", "confluent_kafka"), ("kafka-python", "kafka"), ("aiokafka", "aiokafka")]
)
def test_a_client_that_is_not_installed_is_reported_before_anything_is_started(
    command: str, client: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers would fail one after the other until the run gives up."""
    for loaded in [name for name in sys.modules if name.startswith("semel.verify.clients.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    done = CliRunner().invoke(app, [command, "--client", client, "--time", "1s", "--folder", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert f"{client} is missing. Install it: pip install {client}" in " ".join(done.output.split())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_every_section_of_the_bench_says_what_it_needs() -> None:
    """A new one cannot be forgotten."""
    from semel.bench import SECTIONS

    assert set(NEEDS) == set(SECTIONS)


def test_nothing_is_missing_here() -> None:
    """The checks let a complete environment through: this one runs the demo's own tests."""
    assert needs.missing(tuple({need for needed in NEEDS.values() for need in needed})) is None
