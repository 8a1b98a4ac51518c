"""Figures of `semel bench transactions`, kept on the machine where they were measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.testing.maven import cache_folder

_FILE: Final = "bench-transactions.json"
_SIZES: Final = ("1", "1,000", "100,000")


@dataclass(frozen=True, slots=True)
class Figures:
    """What transactions cost here: rows of the bench by their case."""

    measured_on: str
    """The day."""
    rows: tuple[Mapping[str, Any], ...]

    def lines(self) -> tuple[str, ...]:
        """For people: the cost by the size of a transaction."""
        said = [
            f"{row['case']}: {row['transactions / idempotent']:.0%} of the throughput without transactions, commit p50 "
            f"{row['commit p50 ms']:.1f} ms, p99 {row['p99 ms']:.1f} ms"
            for row in self.rows
            if row["case"].rpartition(" ")[2] in _SIZES
        ]
        return (f"Measured on this machine on {self.measured_on} (semel bench transactions):", *said)


def save_figures(rows: Iterable[Mapping[str, Any]], day: str) -> Path:
    """Keep the rows of a run. They count on this machine alone."""
    file = cache_folder() / _FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": platform.node(), "day": day, "rows": list(rows)}), encoding="utf-8")
    return file


def load_figures() -> Figures | None:
    """What was measured on this machine, if anything was and can be read."""
    try:
        kept = json.loads((cache_folder() / _FILE).read_text(encoding="utf-8"))
        if kept["machine"] != platform.node():
            return None
        figures = Figures(kept["day"], tuple(kept["rows"]))
        figures.lines()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # never measured, or kept by another release
    return figures
