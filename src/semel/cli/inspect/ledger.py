"""`semel inspect ledger`: what a Spark pipeline has committed."""

from __future__ import annotations

from typing import Annotated

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, connect
from semel.cli.output import AsJson, Shown, Watch, expected_errors, show, table
from semel.client.cluster import Cluster
from semel.inspect.ledgers import DEFAULT_LEDGER, read_ledger
from semel.inspect.shown import show_text, show_time


def ledger(
    name: Annotated[str | None, typer.Argument(help="The pipeline's name; all pipelines without it.")] = None,
    topic: Annotated[str, typer.Option(help="The topic that the pipelines were given as ledger=.")] = DEFAULT_LEDGER,
    limit: Annotated[int, typer.Option(min=1, help="How many entries, the newest ones.")] = 20,
    as_json: AsJson = False,
    watch: Watch = None,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Show the micro-batches and jobs that Spark pipelines have committed to Kafka.

    The newest batch of each pipeline is always there. Older ones are shown
    until compaction removes them. Pipelines into a database have their ledger
    in that database, in the table semel_ledger, which this does not read.

    \b
    semel inspect ledger orders-enriched --bootstrap localhost:9092
    semel inspect ledger --json | jq '.[] | select(.status == "committed") | .batch'
    """
    with expected_errors(), connect(bootstrap, profile, config, setting) as cluster:
        show(lambda: _report(cluster, name, topic, limit), as_json=as_json, watch=watch)


def _report(cluster: Cluster, name: str | None, topic: str, limit: int) -> Shown:
    entries = [one for one in read_ledger(cluster, name, topic=topic) if not one.is_by_query][-limit:]
    values = [
        {
            "pipeline": one.pipeline,
            "job": one.job,
            "batch": None if one.job is not None else one.entry.batch,
            "query": one.entry.query or None,
            "status": one.status,
            "records": one.entry.records,
            "outputs": one.entry.outputs,
            "at_ms": one.entry.at_ms,
            "producer_id": one.entry.producer_id,
            "producer_epoch": one.entry.producer_epoch,
            "input_ends": [end.topics for end in one.entry.ends],
            "partition": one.partition,
            "offset": one.offset,
        }
        for one in entries
    ]
    if not values:
        which = "no pipeline" if name is None else f"no pipeline {show_text(name)!r}"
        return Shown(values, [f"The ledger {show_text(topic)} has {which}."])
    rows = [
        (
            show_time(one["at_ms"]),
            one["pipeline"],
            f"job {one['job']}" if one["job"] is not None else f"batch {one['batch']}",
            one["status"],
            one["records"],
            " ".join(one["outputs"] or ["-"]),
            one["producer_id"],
            one["producer_epoch"],
        )
        for one in values
    ]
    titles = ("COMMITTED AT", "PIPELINE", "WHAT", "STATUS", "RECORDS", "OUTPUTS", "PRODUCER ID", "EPOCH")
    return Shown(values, table(titles, rows, right=("RECORDS", "PRODUCER ID", "EPOCH")))
