"""Where the `semel` command begins. The broker goes past typer, whose import would cost it a fifth of a second."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command that `sys.argv` says."""
    if sys.argv[1:2] == ["broker"]:
        from semel.broker.__main__ import leave_out_hypothesis
        from semel.broker.__main__ import main as run_broker

        leave_out_hypothesis()
        sys.exit(run_broker(sys.argv[2:]))
    if sys.argv[1:2] == ["demo"]:
        from semel.broker.__main__ import leave_out_hypothesis

        leave_out_hypothesis()  # it would put a folder of its own beside the demo's page
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without UTF-8 gets escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        from semel.cli.main import app

        app()
    except KeyboardInterrupt:  # while modules are loaded
        sys.exit(130)
