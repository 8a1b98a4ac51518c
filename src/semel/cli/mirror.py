"""`semel mirror`: topics from cluster to cluster, until it is stopped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from semel.bridges.mirror.groups import is_group_mirrored
from semel.bridges.mirror.options import BUFFER_BYTES, CUT_BYTES, RETRY_S, MirrorOptions, make_options
from semel.bridges.mirror.report import MirrorProgress, MirrorReport
from semel.bridges.mirror.routes import read_routes, run_routes
from semel.cli.connecting import side_settings
from semel.cli.until_stopped import until_stopped
from semel.errors import ConfigError
from semel.session.sigterm import SigtermWatch

_SOURCE_PANEL: Final = "Source"
_TARGET_PANEL: Final = "Target"


def mirror(
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="HOST:PORT", help="The source; or SEMEL_FROM_BOOTSTRAP.", rich_help_panel=_SOURCE_PANEL
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="HOST:PORT", help="The target; or SEMEL_TO_BOOTSTRAP.", rich_help_panel=_TARGET_PANEL
        ),
    ] = None,
    topics: Annotated[str | None, typer.Option(help="Topics, as a regular expression for whole names.")] = None,
    name: Annotated[
        str | None, typer.Option(help="The mirror's own name: a second one of the same name takes over.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with several routes, in place of the options above.")
    ] = None,
    rename: Annotated[str, typer.Option(help="The name at the target, such as west.{topic}.")] = "{topic}",
    groups: Annotated[str, typer.Option(help="Groups whose positions are carried; empty for none.")] = ".*",
    lost: Annotated[str, typer.Option(help="If records were deleted before: stop, or go-on.")] = "stop",
    recreated: Annotated[str, typer.Option(help="If a topic was made again: stop, or go-on with it.")] = "stop",
    cut_bytes: Annotated[int, typer.Option(help="About how large a transaction at the target may be.")] = CUT_BYTES,
    buffer_bytes: Annotated[int, typer.Option(help="How much is kept in memory.")] = BUFFER_BYTES,
    retry_s: Annotated[float, typer.Option(help="How long a lost cluster is tried again.")] = RETRY_S,
    idle_ms: Annotated[float | None, typer.Option(help="End when nothing has come for so long.")] = None,
    carried: Annotated[
        str | None,
        typer.Option(metavar="GROUP", help="Only say whether a group's positions are at the target; status 1 if not."),
    ] = None,
    from_profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A table of ~/.config/semel/clusters.toml, with Kafka's names; or SEMEL_FROM_PROFILE.",
            rich_help_panel=_SOURCE_PANEL,
        ),
    ] = None,
    from_config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A client.properties file as Kafka's own tools take; or SEMEL_FROM_CONFIG.",
            rich_help_panel=_SOURCE_PANEL,
        ),
    ] = None,
    source_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--source-setting",
            "--from-setting",
            metavar="NAME=VALUE",
            help="A setting of Kafka's clients; may be repeated. Or SEMEL_FROM_KAFKA_SASL_PASSWORD and the like.",
            rich_help_panel=_SOURCE_PANEL,
        ),
    ] = None,
    to_profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The same; or SEMEL_TO_PROFILE.", rich_help_panel=_TARGET_PANEL),
    ] = None,
    to_config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The same; or SEMEL_TO_CONFIG.", rich_help_panel=_TARGET_PANEL),
    ] = None,
    target_setting: Annotated[
        list[str] | None,
        typer.Option(
            "--target-setting",
            "--to-setting",
            metavar="NAME=VALUE",
            help="The same. Or SEMEL_TO_KAFKA_SASL_PASSWORD and the like.",
            rich_help_panel=_TARGET_PANEL,
        ),
    ] = None,
) -> None:
    """Mirror topics from cluster to cluster, each record once, with the source's transactions whole.

    \b
    semel mirror --from a:9092 --to b:9092 --topics 'orders|payments.*' --name west
    semel mirror --from-profile east --to-profile west --topics orders --name west
    semel mirror --from a:9092 --to b:9092 --name west --topics orders --carried billing
    semel mirror --config routes.toml

    Prints one line when it is ready, and on a terminal a line about its lag.
    Ctrl-C and SIGTERM end it after the present transaction. Exits with
    status 1 and one sentence if it cannot go on, with 2 for wrong use.
    """
    options: dict[str, Any] = {
        "rename": rename,
        "groups": groups or None,
        "lost": lost,
        "recreated": recreated,
        "cut_bytes": cut_bytes,
        "buffer_bytes": buffer_bytes,
        "retry_s": retry_s,
    }

    def run(stop: threading.Event) -> dict[str, MirrorReport]:
        if config is not None:
            beside = (source, target, from_profile, from_config, to_profile, to_config, topics, name, carried)
            if any(option is not None for option in (*beside, source_setting, target_setting)):
                raise ConfigError("--config names the routes: leave out --from, --to, --topics, --name and --carried.")
            return _run(read_routes(config), stop, idle_ms)
        route = _route(
            side_settings("from", source, from_profile, from_config, source_setting),
            side_settings("to", target, to_profile, to_config, target_setting),
            topics,
            name,
            options,
        )
        if carried is not None:
            _tell_carried(carried, route)
            return {}
        return _run([route], stop, idle_ms)

    for route, report in until_stopped(run).items():
        typer.echo(_summary(route, report))


def _route(
    source: Mapping[str, object],
    target: Mapping[str, object],
    topics: str | None,
    name: str | None,
    more: dict[str, Any],
) -> MirrorOptions:
    address = "bootstrap.servers"
    given = {"--from": source.get(address), "--to": target.get(address), "--topics": topics, "--name": name}
    for option, value in given.items():
        if value is None:
            raise ConfigError(f"{option} is missing: a mirror needs --from, --to, --topics and --name, or --config.")
    return make_options(name or "", source, target, topics or "", **more)


def _tell_carried(group: str, route: MirrorOptions) -> None:
    if is_group_mirrored(group, name=route.name, source=route.source, target=route.target):
        typer.echo(f"All positions of group {group!r} are at the target.")
        return
    typer.echo(f"Group {group!r} has positions at the source that are not at the target yet.", err=True)
    raise typer.Exit(1)


def _run(routes: Sequence[MirrorOptions], stop: threading.Event, idle_ms: float | None) -> dict[str, MirrorReport]:
    sigterm = SigtermWatch(stop.set)
    sigterm.start()
    try:
        reports = run_routes(
            routes,
            stop,
            idle_ms=idle_ms,
            on_ready=lambda: typer.echo(f"semel mirror ready: {', '.join(route.name for route in routes)}"),
            on_progress=_show if sys.stderr.isatty() else None,
        )
    finally:
        sigterm.end()
    sigterm.raise_exit()
    return reports


def _show(progress: MirrorProgress) -> None:
    typer.echo(progress.line, err=True)


def _summary(name: str, report: MirrorReport) -> str:
    parts = [f"{name}: {report.records} records in {report.cuts} cuts"]
    parts += [f"{report.loops} left out that had come from the target"] if report.loops else []
    parts += [f"{report.lost} offsets lost to retention"] if report.lost else []
    return ", ".join(parts) + "."
