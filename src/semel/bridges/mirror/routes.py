"""Several routes from one file: each is a mirror of its own, in a thread of its own."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from semel.bridges.mirror.options import MirrorOptions, make_options
from semel.bridges.mirror.report import MirrorProgress, MirrorReport
from semel.bridges.mirror.run import MirrorRun
from semel.errors import ConfigError

_OPTIONS: Final = ("name", "topics", "rename", "groups", "lost", "recreated")
_NUMBERS: Final = ("cut_bytes", "buffer_bytes", "follow_s", "groups_s", "retry_s")
_ALLOWED: Final = frozenset((*_OPTIONS, *_NUMBERS, "from", "to", "source", "target"))


def read_routes(path: str | Path) -> list[MirrorOptions]:
    """The routes of a TOML file: tables `[[route]]` with the options of `semel.mirror`, and `from` and `to`.

    `[route.source]` and `[route.target]` hold settings of Kafka's clients.
    """
    try:
        with Path(path).open("rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The routes in {str(path)!r} cannot be read: {error}.") from error
    tables = content.get("route")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{str(path)!r} has no routes: write tables [[route]] with name, from, to and topics.")
    routes = [_read_route(table, str(path)) for table in tables]
    names = [route.name for route in routes]
    if len(set(names)) < len(names):
        raise ConfigError(f"{str(path)!r} has two routes of one name: each needs its own, for its progress.")
    return routes


def _read_route(table: Mapping[str, Any], path: str) -> MirrorOptions:
    if unknown := sorted(table.keys() - _ALLOWED):
        raise ConfigError(f"{path!r}: a route has no option {unknown[0]!r}; there are {', '.join(sorted(_ALLOWED))}.")
    if missing := [name for name in ("name", "from", "to", "topics") if name not in table]:
        raise ConfigError(f"{path!r}: a route lacks {missing[0]!r}.")
    more = {name: value for name, value in table.items() if name not in ("from", "to", "source", "target")}
    if more.get("groups") == "":
        more["groups"] = None
    source = {**table.get("source", {}), "bootstrap.servers": table["from"]}
    target = {**table.get("target", {}), "bootstrap.servers": table["to"]}
    return make_options(more.pop("name"), source, target, more.pop("topics"), **more)


def run_routes(
    routes: Sequence[MirrorOptions],
    stop: threading.Event,
    *,
    idle_ms: float | None = None,
    on_ready: Callable[[], None] | None = None,
    on_progress: Callable[[MirrorProgress], None] | None = None,
) -> dict[str, MirrorReport]:
    """Run all of them until `stop` is set. The first that fails ends the others, and its error is raised."""
    errors: list[BaseException] = []
    waited_for = {route.name for route in routes}
    runs = [MirrorRun(route, stop.is_set, on_progress) for route in routes]

    def note_ready(name: str) -> None:
        waited_for.discard(name)
        if not waited_for and on_ready is not None:
            on_ready()

    def go(run: MirrorRun) -> None:
        try:
            run.go(idle_ms, lambda: note_ready(run.options.name))
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=go, args=(run,), name=run.options.name) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)  # so that signals are handled meanwhile
    if errors:
        raise errors[0]
    return {run.options.name: run.report for run in runs}
