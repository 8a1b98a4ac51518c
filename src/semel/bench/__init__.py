"""Side-by-side measurements with bars to clear: `semel bench`.

A section is a module here with a function `run` that returns a `Section`. Modules are loaded when their section runs,
because they import the clients that they compare with.
"""

from __future__ import annotations

from importlib import import_module

from semel.bench.report import Section
from semel.errors import ConfigError

SECTIONS = {
    "records": "semel.bench.records",
    "client": "semel.bench.client",
    "broker": "semel.bench.broker",
    "transactions": "semel.bench.transactions",
    "session": "semel.bench.session",
    "checker": "semel.bench.checker",
}


def run_sections(name: str | None = None) -> list[Section]:
    """Run one section, or all of them."""
    if name is not None and name not in SECTIONS:
        raise ConfigError(f"There is no bench section {name!r}; there are {', '.join(SECTIONS)}.")
    return [import_module(SECTIONS[section]).run() for section in ([name] if name else SECTIONS)]
