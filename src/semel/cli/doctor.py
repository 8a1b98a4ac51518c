"""`semel doctor`: mistakes in a cluster, in settings and in programs that cost records, with what puts them right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from semel.advise.examine import examine_cluster, examine_files
from semel.advise.pipeline_check import PipelineFacts, check_pipeline
from semel.advise.rules import RULES, SEVERITIES, Finding, in_order
from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, settings_if_named
from semel.cli.output import Console, print_failure
from semel.cli.progress import working
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.errors import ConfigError, SemelError
from semel.inspect.pipelines import find_pipeline, told
from semel.inspect.shown import show_text

_COLOURS: Final = {"error": "red", "warning": "yellow", "note": "cyan"}
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def doctor(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Python programs, and files of settings (properties, spark-defaults.conf, JSON, YAML)."),
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Look only at this topic; may be repeated.")] = None,
    pipeline: Annotated[
        str | None, typer.Option(metavar="NAME", help="Look at this running pipeline and its topics.")
    ] = None,
    longest_pause: Annotated[
        str | None, typer.Option(help="How long a pipeline may stand still, such as 12h or 10d: do offsets last?")
    ] = None,
    watch: Annotated[str, typer.Option(help="How long to watch the transactional ids.")] = "2s",
    fix: Annotated[
        bool, typer.Option("--fix", help="Print the commands and lines that put it right. Changes nothing.")
    ] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Look for mistakes that lose or repeat records, in programs, settings, and a running cluster.

    \b
    semel doctor pipeline.py producer.properties
    semel doctor --bootstrap localhost:9092 --longest-pause 10d
    semel doctor --profile prod job.py --fix
    semel doctor --bootstrap localhost:9092 --pipeline orders-enriched
    semel doctor --json pipeline.py | jq '.findings[].rule'

    Only looks. Files are read, never run; a cluster is not changed.

    Exits with status 0 if there is no error (warnings and notes may be
    there), with 1 if there is one, and with 2 if it could not look.
    """
    console = Console(stderr=as_json)
    if rules:
        _print_rules(as_json, console)
        return
    try:
        settings = _cluster(bootstrap, profile, config, setting)
        with working("looking"):
            found = None if pipeline is None else _find(settings, pipeline)
            topics = topic if found is None else [*(topic or []), *found.topics]
            findings, not_seen = _look(files or [], settings, topics, longest_pause, watch)
        if found is not None:
            findings = in_order([*findings, *check_pipeline(found)])
            not_seen = [*not_seen, *found.not_seen]
    except SemelError as error:
        print_failure("Could not look", error)
        raise typer.Exit(2) from error
    if as_json:
        counts = {severity: sum(one.rule.severity == severity for one in findings) for severity in SEVERITIES}
        report = {"findings": [one.as_dict() for one in findings], "counts": counts, "not_seen": not_seen}
        typer.echo(json.dumps(report if found is None else {**report, "pipeline": found.as_dict()}, indent=2))
    else:
        for line in [] if found is None else told(found):
            console.print(show_text(line, longest=2_000), highlight=False, soft_wrap=True, markup=False)
        _print(findings, not_seen, fix, console)
    if any(one.rule.severity == "error" for one in findings):
        raise typer.Exit(1)


def _look(
    files: list[Path],
    settings: dict[str, object],
    topics: list[str] | None,
    longest_pause: str | None,
    watch: str,
) -> tuple[list[Finding], list[str]]:
    if not files and not settings:
        raise ConfigError("There is nothing to look at: name a file, or a cluster with --bootstrap HOST:PORT.")
    pause_s = None if longest_pause is None else _seconds("--longest-pause", longest_pause)
    watch_s = _seconds("--watch", watch)
    found: list[Finding] = []
    not_seen: list[str] = []
    timeout_ms_max = None
    if settings:
        findings, facts = examine_cluster(settings, topics=topics, longest_pause_s=pause_s, watch_s=watch_s)
        found += findings
        not_seen, timeout_ms_max = facts.not_seen, facts.transaction_timeout_ms_max
    return in_order([*found, *examine_files(files, transaction_timeout_ms_max=timeout_ms_max)]), not_seen


def _find(settings: dict[str, object], name: str) -> PipelineFacts:
    if not settings:
        raise ConfigError("--pipeline is for a cluster: name it with --bootstrap HOST:PORT. Nothing was asked.")
    with Cluster(parse_config(settings).client) as cluster:
        facts = find_pipeline(cluster, name)
    if not facts.is_known:
        missed = f" Not seen: {'; '.join(facts.not_seen)}" if facts.not_seen else ""
        raise ConfigError(
            f"Nothing in this cluster is of a pipeline {name!r}: no entry in the ledger, no group and no "
            f"transactional id. Write the name= that it was given.{missed}"
        )
    return facts


def _cluster(
    bootstrap: str | None, profile: str | None, config: str | None, setting: list[str] | None
) -> dict[str, object]:
    """How to reach the cluster that flags or the environment name; empty if files alone are looked at."""
    named = settings_if_named(bootstrap, profile, config, setting)
    if named is None and any(flag is not None for flag in (profile, config, setting)):
        raise ConfigError(
            "These flags name no cluster: add --bootstrap HOST:PORT, or bootstrap.servers to the file or profile."
        )
    return named or {}


def _seconds(name: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ConfigError(f"{name} {text!r} is no time: write a number with s, m, h or d, such as 90s or 10d.")
    return float(found[1]) * _UNITS_S[found[2]]


def _print(findings: list[Finding], not_seen: list[str], fix: bool, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for one in findings:
        rule = one.rule
        say(f"[{_COLOURS[rule.severity]}]{rule.severity}[/] [bold]{rule.id}[/bold]  {escape(one.where)}")
        say(f"  {escape(one.what)}.")
        if fix:
            for command in one.commands or (rule.fix,):
                say(f"    {escape(command)}")
        else:
            say(f"  {escape(rule.reason)}")
            say(f"  Fix: {escape(rule.fix)}  ({rule.link})")
    for what in not_seen:
        say(f"[yellow]not seen[/yellow] {escape(what)}")
    counts = [(severity, sum(one.rule.severity == severity for one in findings)) for severity in SEVERITIES]
    told = ", ".join(f"{count} {severity}{'s' if count > 1 else ''}" for severity, count in counts if count)
    say(f"{told}." if told else "Nothing was found.")


def _print_rules(as_json: bool, console: Console) -> None:
    if as_json:
        every = [
            {"id": rule.id, "severity": rule.severity, "looks_at": list(rule.places), "title": rule.title}
            for rule in RULES.values()
        ]
        typer.echo(json.dumps(every, indent=2))
        return
    for rule in RULES.values():
        console.print(f"[{_COLOURS[rule.severity]}]{rule.severity:<8}[/] {rule.id:<46} {', '.join(rule.places)}")
