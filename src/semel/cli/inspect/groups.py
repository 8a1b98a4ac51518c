"""`semel inspect groups`: members, offsets and the true lag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import AsJson, Shown, Watch, bold, expected_errors, show, table
from semel.cli.progress import tell
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.errors import KafkaError, SemelError
from semel.inspect.groups import GroupReport, PartitionLag, group_report
from semel.inspect.lag import TrueLag
from semel.inspect.shown import show_text
from semel.inspect.wording import LAG_TITLES, lag_cells
from semel.wire import ErrorCode


def groups(
    group: Annotated[list[str] | None, typer.Argument(help="Only these groups, with each of their partitions.")] = None,
    limit_mb: Annotated[
        int, typer.Option(min=0, help="How much of the logs may be read for a group's lag; 0 shows offsets alone.")
    ] = 256,
    as_json: AsJson = False,
    watch: Watch = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show consumer groups and their true lag.

    LAG counts the records that a reader of committed records still has to
    read. Transaction markers and aborted records are not among them. NAIVE is
    end minus committed offset, as most tools show it: it does not reach 0 on a
    transactional topic. WAITING records are committed and can be read as soon
    as older transactions end; OPEN ones depend on their own transaction.

    Kafka tells these apart only in the log itself, so it is read from the
    committed offsets on. Where --limit-mb ends that, LAG is shown as a range.

    \b
    semel inspect groups --bootstrap localhost:9092
    semel inspect groups billing --watch 2
    semel inspect groups --json | jq '.[] | {group, lag: .lag.readable}'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        show(lambda: _report(cluster, group or [], limit_mb << 20), as_json=as_json, watch=watch)


def _telling(name: str) -> Callable[[int, int], None]:
    shown = show_text(name)
    return lambda number, of: tell(f"group {shown}: partition {number} of {of}")


def _report(cluster: Cluster, wanted: Sequence[str], bytes_max: int) -> Shown:
    names = wanted or [listed.group for listed in Admin(cluster).list_groups()]
    reports: list[GroupReport] = []
    troubles: dict[str, str] = {}
    for name in names:
        try:
            report = group_report(cluster, name, bytes_max=bytes_max, on_partition=_telling(name))
            if wanted and report.state == "Dead" and not report.partitions:
                raise KafkaError(
                    f"The cluster has no group {name!r}. Check the name with semel inspect groups.",
                    code=ErrorCode.group_id_not_found,
                )
            reports.append(report)
        except SemelError as error:
            if wanted:
                raise
            troubles[name] = str(error)  # one group that may not be read must not hide the others
    lines = _lines(reports, with_partitions=bool(wanted))
    lines += [f"{show_text(name)}: {show_text(trouble, longest=500)}" for name, trouble in troubles.items()]
    values = [_value(report) for report in reports]
    return Shown([*values, *({"group": name, "trouble": trouble} for name, trouble in troubles.items())], lines)


def _lines(reports: Sequence[GroupReport], *, with_partitions: bool) -> list[str]:
    if not reports:
        return ["There are no groups."]
    rows = [
        (report.group, report.state, report.members, len(report.partitions), *lag_cells(report.total))
        for report in reports
    ]
    titles = ("GROUP", "STATE", "MEMBERS", "PARTITIONS", *LAG_TITLES)
    lines = table(titles, rows, right=titles[2:])
    for report in reports:
        if report.is_pending:
            lines.append(
                f"{show_text(report.group)}: an open transaction holds offsets of it, so they may move on yet."
            )
        if report.uncounted:
            why = "" if with_partitions else "; name the group to see why"
            lines.append(f"{show_text(report.group)}: {report.uncounted} partitions are not in these numbers{why}.")
        if with_partitions and report.partitions:
            lines += ["", bold(show_text(report.group)), *_partition_lines(report.partitions)]
    return lines


def _partition_lines(partitions: Sequence[PartitionLag]) -> list[str]:
    rows = [
        (
            f"{one.topic}:{one.partition}",
            one.committed,
            one.last_stable_offset if one.last_stable_offset >= 0 else "-",
            one.high_watermark if one.high_watermark >= 0 else "-",
            *lag_cells(one.lag),
            one.member or "-",
        )
        for one in partitions
    ]
    titles = ("PARTITION", "COMMITTED", "STABLE TO", "END", *LAG_TITLES, "MEMBER")
    lines = table(titles, rows, right=titles[1:-1])
    for one in partitions:
        place = show_text(f"{one.topic}:{one.partition}", longest=None)
        if one.trouble is not None:
            lines.append(f"{place}: {show_text(one.trouble, longest=500)}")
        if one.lost:
            lines.append(f"{place}: {one.lost} offsets were deleted before the group has read them.")
    return lines


def _value(report: GroupReport) -> dict[str, Any]:
    return {
        "group": report.group,
        "state": report.state,
        "protocol_type": report.protocol_type,
        "members": report.members,
        "offsets_pending": report.is_pending,
        "lag": _lag_value(report.total),
        "uncounted_partitions": report.uncounted,
        "partitions": [
            {
                "topic": one.topic,
                "partition": one.partition,
                "committed": one.committed,
                "log_start": one.log_start,
                "last_stable_offset": one.last_stable_offset,
                "high_watermark": one.high_watermark,
                "member": one.member,
                "deleted_before_read": one.lost,
                "lag": None if one.lag is None else _lag_value(one.lag),
                "trouble": one.trouble,
            }
            for one in report.partitions
        ],
    }


def _lag_value(lag: TrueLag) -> dict[str, Any]:
    return {
        "readable": lag.readable,
        "at_most": lag.at_most,
        "is_exact": lag.is_exact,
        "naive": lag.naive,
        "waiting": lag.waiting,
        "open": lag.open,
        "aborted": lag.aborted,
        "markers": lag.markers,
        "unread_offsets": lag.unread_offsets,
        "unread_beyond": lag.unread_beyond,
    }
