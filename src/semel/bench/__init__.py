"""Side-by-side measurements with bars to clear: `semel bench`.

A section is a module here with a function `run` that returns a `Section`. Modules are loaded when their section runs,
because they import the clients that they compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature

from semel.bench.report import Section
from semel.errors import ConfigError

SECTIONS = {
    "records": "semel.bench.records",
    "client": "semel.bench.client",
    "broker": "semel.bench.broker",
    "transactions": "semel.bench.transactions",
    "session": "semel.bench.session",
    "mirror": "semel.bench.mirror",
    "checker": "semel.bench.checker",
    "spark": "semel.bench.spark",
    "bridges": "semel.bench.bridges",
}


def run_sections(
    name: str | None = None, *, on_section: Callable[[str], None] | None = None, **sizes: object
) -> list[Section]:
    """Run one section, or all of them. `sizes` are handed on where they are not None; a section knows its own.

    `on_section` is called with the name of each before it begins.
    """
    if name is not None and name not in SECTIONS:
        raise ConfigError(f"There is no bench section {name!r}; there are {', '.join(SECTIONS)}.")
    given = {size: value for size, value in sizes.items() if value is not None}
    functions = [(section, import_module(SECTIONS[section]).run) for section in ([name] if name else SECTIONS)]
    for section, function in functions:
        unknown = [size for size in given if size not in signature(function).parameters]
        if unknown:
            raise ConfigError(
                f"The bench section {section!r} has no --{unknown[0]}; run the one that you mean by name."
            )
    measured: list[Section] = []
    for section, function in functions:
        if on_section is not None:
            on_section(section)
        measured.append(function(**given))
    return measured
