"""`python -m semel.bench [SECTION] [--json]`."""

from __future__ import annotations

import typer

from semel.cli.bench import bench

if __name__ == "__main__":
    typer.run(bench)
