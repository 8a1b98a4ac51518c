"""`semel inspect transactions`: what is open, what holds readers back, and the end of what hangs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import (
    AsJson,
    Shown,
    Watch,
    Yes,
    bold,
    confirm,
    expected_errors,
    parse_place,
    print_json,
    sentence,
    show,
    table,
)
from semel.client.cluster import Cluster
from semel.errors import ConfigError, KafkaError, UnsupportedByBroker
from semel.inspect.hanging import OpenTransaction
from semel.inspect.shown import show_span, show_text, show_time
from semel.inspect.transaction_log import Transition, recent_transitions
from semel.inspect.transactions import (
    HeldPartition,
    KnownTransaction,
    end_hanging,
    find_open,
    held_partitions,
    known_transactions,
)

_ALL_STATES = "all"


def transactions(
    transactional_id: Annotated[
        list[str] | None, typer.Argument(help="Only these ids, with what they did lately.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Ongoing, PrepareCommit, PrepareAbort, CompleteCommit, CompleteAbort, Empty; or all."),
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Look for held readers only in these topics.")] = None,
    end: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC:PARTITION", help="End a hanging transaction in this partition; needs --producer-id."
        ),
    ] = None,
    producer_id: Annotated[int | None, typer.Option(help="With --end: whose transaction.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --end: also one that is not known to hang. Half of it may be lost.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    watch: Watch = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show transactions, and what holds readers of committed records back.

    The first table has what coordinators know: those that are under way, or
    all with --state all. The second has the partitions that readers of
    committed records cannot read to their end, with the transaction that
    holds them. A transaction hangs if no coordinator will ever end it.

    \b
    semel inspect transactions --bootstrap localhost:9092
    semel inspect transactions --state all --json | jq '.transactions[].id'
    semel inspect transactions order-writer --profile prod
    semel inspect transactions --end orders:0 --producer-id 4001
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        if end is not None:
            _end(cluster, end, producer_id, force=force, yes=yes, as_json=as_json)
            return
        if producer_id is not None or force or yes:
            raise ConfigError("--producer-id, --force and --yes are for --end TOPIC:PARTITION. Nothing was asked.")
        if transactional_id:
            show(lambda: _report_ids(cluster, transactional_id), as_json=as_json, watch=watch)
            return
        states = _states(state or [])
        show(lambda: _report(cluster, states, topic or []), as_json=as_json, watch=watch)


def _states(chosen: Sequence[str]) -> list[str]:
    if _ALL_STATES in chosen:
        return []
    return list(chosen) or ["Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence"]


# -- the report ----------------------------------------------------------------------------------------------------


def _report(cluster: Cluster, states: Sequence[str], topics: Sequence[str]) -> Shown:
    known = known_transactions(cluster, states=states)
    held = held_partitions(cluster, topics)
    now_ms = time.time() * 1000
    lines = _known_lines(known)
    lines += ["", bold("Partitions that readers of committed records cannot read to their end")]
    lines += _held_lines(held, now_ms) if held else ["None: no open transaction holds readers back."]
    value = {"transactions": [_known_value(one) for one in known], "held": [_held_value(one) for one in held]}
    return Shown(value, lines)


def _known_lines(known: Sequence[KnownTransaction]) -> list[str]:
    if not known:
        return ["No transaction in these states."]
    rows = [
        (
            one.description.transactional_id,
            one.description.state,
            show_span(one.age_ms),
            one.description.producer_id,
            one.description.producer_epoch,
            one.coordinator,
            "two-phase" if one.description.is_two_phase else show_span(one.description.timeout_ms),
            _places(one.description.partitions),
        )
        for one in known
    ]
    titles = ("TRANSACTIONAL ID", "STATE", "OPEN FOR", "PRODUCER ID", "EPOCH", "COORDINATOR", "TIMEOUT", "PARTITIONS")
    return table(titles, rows, right=("PRODUCER ID", "EPOCH"))


def _places(partitions: Sequence[tuple[str, int]], shown: int = 5) -> str:
    first = " ".join(f"{topic}:{number}" for topic, number in partitions[:shown])
    return f"{first} and {len(partitions) - shown} more" if len(partitions) > shown else first or "-"


def _held_lines(held: Sequence[HeldPartition], now_ms: float) -> list[str]:
    rows = [
        (
            f"{one.topic}:{one.partition}",
            one.last_stable_offset,
            one.high_watermark,
            show_span(None if one.since_ms is None else max(0.0, now_ms - one.since_ms)),
            "-" if one.holder is None else one.holder.producer.producer_id,
            "-" if one.holder is None else one.holder.transactional_id or "-",
            "-" if one.holder is None else one.holder.standing,
        )
        for one in held
    ]
    titles = ("PARTITION", "STABLE TO", "END", "HELD FOR", "PRODUCER ID", "TRANSACTIONAL ID", "STANDING")
    lines = table(titles, rows, right=("STABLE TO", "END", "PRODUCER ID"))
    for one in held:
        if one.trouble is not None:
            lines.append(f"{show_text(f'{one.topic}:{one.partition}', longest=None)}: {show_text(one.trouble, 500)}")
        if one.holder is not None and one.holder.standing != "alive":
            lines += ["", *_explain(one.holder)]
    return lines


def _explain(one: OpenTransaction) -> list[str]:
    place = show_text(f"{one.topic}:{one.partition}", longest=None)
    said = "hangs" if one.standing == "hanging" else "may hang"
    command = f"semel inspect transactions --end {_quoted(f'{one.topic}:{one.partition}')}"
    return [
        bold(f"{place}: the transaction of producer {one.producer.producer_id} from offset {one.start_offset} {said}."),
        one.explanation,
        "Readers of committed records stop there until it is ended. Its records will be aborted. First make sure",
        f"that its producer is gone, then: {command} --producer-id {one.producer.producer_id}"
        + (" --force" if one.standing == "unknown" else ""),
    ]


def _quoted(text: str) -> str:
    plain = text.replace(":", "").replace("-", "").replace("_", "").replace(".", "")
    return text if plain.isascii() and plain.isalnum() else f"'{show_text(text, longest=None)}'"


def _known_value(one: KnownTransaction) -> dict[str, Any]:
    told = one.description
    return {
        "id": told.transactional_id,
        "state": told.state,
        "open_for_ms": one.age_ms,
        "started_ms": told.start_time_ms,
        "timeout_ms": None if told.is_two_phase else told.timeout_ms,
        "two_phase": told.is_two_phase,
        "producer_id": told.producer_id,
        "producer_epoch": told.producer_epoch,
        "coordinator": one.coordinator,
        "partitions": [{"topic": topic, "partition": number} for topic, number in told.partitions],
    }


def _held_value(one: HeldPartition) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "last_stable_offset": one.last_stable_offset,
        "high_watermark": one.high_watermark,
        "since_ms": one.since_ms,
        "trouble": one.trouble,
        "holder": None if one.holder is None else open_value(one.holder),
    }


def open_value(one: OpenTransaction) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "producer_id": one.producer.producer_id,
        "producer_epoch": one.producer.producer_epoch,
        "start_offset": one.start_offset,
        "transactional_id": one.transactional_id,
        "state": one.state,
        "standing": one.standing,
        "explanation": one.explanation,
    }


# -- single ids ----------------------------------------------------------------------------------------------------


def _report_ids(cluster: Cluster, names: Sequence[str]) -> Shown:
    known = known_transactions(cluster, transactional_ids=names)
    values, lines = [], _known_lines(known)
    for one in known:
        name = one.description.transactional_id
        lines += ["", bold(f"What {show_text(name)} did lately")]
        try:
            lately = recent_transitions(cluster, name)
        except (KafkaError, UnsupportedByBroker) as error:
            values.append({**_known_value(one), "lately": None})
            lines.append(f"Cannot be told: __transaction_state cannot be read. {sentence(error)}")
            continue
        values.append({**_known_value(one), "lately": [_transition_value(change) for change in lately]})
        rows = [
            (
                show_time(change.at_ms),
                change.state,
                change.producer_id,
                change.producer_epoch,
                _places(change.partitions),
            )
            for change in lately
        ]
        titles = ("TIME", "STATE", "PRODUCER ID", "EPOCH", "PARTITIONS")
        lines += table(titles, rows, right=("PRODUCER ID", "EPOCH"))
    return Shown({"transactions": values}, lines)


def _transition_value(change: Transition) -> dict[str, Any]:
    return {
        "at_ms": change.at_ms,
        "state": change.state,
        "producer_id": change.producer_id,
        "producer_epoch": change.producer_epoch,
        "partitions": [{"topic": topic, "partition": number} for topic, number in change.partitions],
    }


# -- ending --------------------------------------------------------------------------------------------------------


def _end(cluster: Cluster, place: str, producer_id: int | None, *, force: bool, yes: bool, as_json: bool) -> None:
    topic, partition = parse_place(place)
    if partition is None or producer_id is None:
        raise ConfigError(
            "--end needs a partition and a producer: --end TOPIC:PARTITION --producer-id N. Nothing was asked."
        )
    found = find_open(cluster, topic, partition, producer_id)
    if found.standing == "hanging" or force:
        for line in _before_ending(found):
            typer.echo(line, err=True)
        confirm("Abort it in this partition?", yes=yes)
    ended = end_hanging(cluster, topic, partition, producer_id, start_offset=found.start_offset, force=force)
    if as_json:
        print_json({"ended": open_value(ended)}, indent=2)
    else:
        typer.echo(f"The transaction is aborted in {show_text(place, longest=None)}, and readers go on.")


def _before_ending(one: OpenTransaction) -> list[str]:
    place = show_text(f"{one.topic}:{one.partition}", longest=None)
    lines = [f"{place}: producer {one.producer.producer_id}, from offset {one.start_offset}. {one.explanation}"]
    if one.standing != "hanging":
        lines.append("It is not known to hang. If it is committed elsewhere, its records in this partition are lost.")
    return lines
