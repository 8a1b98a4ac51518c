"""`committed_offsets`: where a pipeline's input stood at its last commit, for a source that goes on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import ConfigError
from semel.spark.input_offsets import merge_ends
from semel.spark.ledger import Entry, Ledger
from semel.spark.options import DEFAULT_LEDGER, make_options
from semel.spark.source_offsets import EARLIEST, to_checkpoint
from semel.spark.target import Target, check_one_target


def committed_offsets(
    *,
    name: str,
    to: Target | None = None,
    bootstrap: str | None = None,
    ledger: str = DEFAULT_LEDGER,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> str:
    """The end of the pipeline's last committed batch, as JSON for the source's option `startingOffsets`.

    For a pipeline without state whose checkpoint is lost; pass `resume="committed"` to the sink as well. Both Semel's
    and Spark's own Kafka source take it. The ledger keeps it for as long as it exists, other than a group's offsets,
    which expire. Partitions that were added since begin with their first record, if the input is on the same cluster.
    For a database pass `to`, and with it the input's `bootstrap` if partitions may have been added.

    >>> start = committed_offsets(name="orders-enriched", bootstrap="127.0.0.1:9092")  # doctest: +SKIP
    >>> spark.readStream.format("semel").option("startingOffsets", start)  # doctest: +SKIP
    """
    if to is not None:
        given = {} if ledger == DEFAULT_LEDGER else {"ledger": ledger}
        return to.committed_offsets(name=name, bootstrap=bootstrap, **given, **(settings or {}), **more_settings)
    check_one_target(to, bootstrap)
    assert bootstrap is not None, "check_one_target has seen to that"
    options = make_options(
        name=name, bootstrap=bootstrap, topic=None, settings=settings, more_settings=more_settings, ledger=ledger
    )
    with Cluster(parse_config(options.settings).client) as cluster:
        kept = Ledger(cluster, ledger)
        entry = kept.read(name, is_owner=False) if kept.exists() else None
        return offsets_of(entry, f"Pipeline {name!r}", "Check name=, bootstrap= and ledger=.", cluster)


def offsets_of(entry: Entry | None, pipeline: str, advice: str, cluster: Cluster | None) -> str:
    """The position in an entry, with partitions that `cluster` has since, if the input is there."""
    if entry is None or not entry.ends:
        reason = "has committed nothing" if entry is None else "had no input from Kafka in its last batch"
        raise ConfigError(
            f"{pipeline} {reason}, as far as the ledger knows, so there is no position to go on from. {advice}"
        )
    offsets = merge_ends(entry.ends)
    if cluster is not None:
        here = Admin(cluster).describe_cluster().cluster_id
        if all(end.cluster == here for end in entry.ends):
            topics = cluster.list_topics()
            for topic in {named.topic for named in offsets}:
                for partition in topics.get(topic, {}):
                    offsets.setdefault(TopicPartition(topic, partition), EARLIEST)
    return json.dumps(to_checkpoint(offsets))
