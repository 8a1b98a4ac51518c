"""Every command, also those that come later: a wrong flag is one sentence and status 2, and help needs nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from semel.cli.main import app

SEMEL = [sys.executable, "-c", "from semel.cli.entry import main; main()"]


def paths(command: Any, *before: str) -> list[tuple[str, ...]]:
    """The words of each command that can be run."""
    if hasattr(command, "commands"):
        return [found for name, one in command.commands.items() for found in paths(one, *before, name)]
    return [before]


COMMANDS = [path for path in paths(typer.main.get_command(app)) if path != ("broker",)]
"""The broker reads its own arguments; tests/broker/test_broker_arguments.py has them."""


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_wrong_flag_is_status_2_and_help_is_status_0(path: tuple[str, ...]) -> None:
    """Nothing on standard output of the first, and no stack trace."""
    wrong = CliRunner().invoke(app, [*path, "--no-such-flag"])
    assert (wrong.exit_code, wrong.stdout) == (2, ""), wrong.output
    assert "No such option" in wrong.stderr or "Missing argument" in wrong.stderr
    assert isinstance(wrong.exception, SystemExit)
    helped = CliRunner().invoke(app, [*path, "--help"])
    assert helped.exit_code == 0
    assert f"semel {path[0]}" in " ".join(helped.stdout.split()), "help teaches with an example"


@pytest.mark.parametrize("command", ["dashboard", "alerts"])
def test_a_file_into_a_program_that_stops_reading_ends_quietly(command: str) -> None:
    """Status 141, and nothing on standard error."""
    with subprocess.Popen(
        [*SEMEL, "metrics", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as printing:
        assert printing.stdout is not None
        assert printing.stderr is not None
        printing.stdout.close()
        assert printing.wait(120) == 141
        assert printing.stderr.read() == b""
