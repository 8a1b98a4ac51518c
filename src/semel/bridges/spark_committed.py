"""`committed_offsets` from a database: where a pipeline's input stood when its last batch was committed there."""

from __future__ import annotations

from typing import Any

from semel.bridges.database import LEDGER
from semel.bridges.spark_ledger import DatabaseLedger
from semel.bridges.targets import DatabaseTarget
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.spark.committed import offsets_of
from semel.spark.options import make_options


def committed_offsets_in(target: DatabaseTarget, *, name: str, bootstrap: str | None, **settings: Any) -> str:
    """What `semel.committed_offsets(name=..., to=target)` does. With `bootstrap` it looks for new partitions."""
    with target.open() as database:
        is_there = database.columns(LEDGER) is not None
        entry = DatabaseLedger(database, name, name).read().latest if is_there else None
    advice = "Check name= and to=."
    if bootstrap is None:
        return offsets_of(entry, f"Pipeline {name!r}", advice, None)
    options = make_options(name=name, bootstrap=bootstrap, topic=None, settings=None, more_settings=settings)
    with Cluster(parse_config(options.settings).client) as cluster:
        return offsets_of(entry, f"Pipeline {name!r}", advice, cluster)
