"""The seam between the calls for Spark and the objects that say where to write: `to=semel.Postgres(...)`.

Targets are made in `semel.bridges`, which this package does not know. It hands a call over to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from semel.errors import ConfigError
from semel.spark.progress import BatchProgress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class Target(Protocol):
    """Where rows go: a topic, or a table of a database."""

    def write_stream(self, df: DataFrame, *, name: str, checkpoint: str, **options: Any) -> StreamingQuery: ...

    def write_batch(self, df: Any, *, name: str, job_id: str, **options: Any) -> BatchProgress: ...

    def committed_offsets(self, *, name: str, **options: Any) -> str: ...


def check_one_target(to: Target | None, bootstrap: str | None, topic: str | None = None) -> None:
    """Refuse two places to write to, and none."""
    if isinstance(to, str):
        raise ConfigError(
            "to= is text; nothing was written. Write to=semel.Postgres(url, table=...), semel.SQLite(path, table=...) "
            "or semel.Kafka(bootstrap, topic=...)."
        )
    if to is not None and (bootstrap is not None or topic is not None):
        raise ConfigError(
            "to= and bootstrap= or topic= name two targets; nothing was written. Pass one of them: topics are written "
            "by bootstrap= and topic=, or by to=semel.Kafka(...)."
        )
    if to is None and bootstrap is None:
        raise ConfigError(
            "There is nowhere to write to; nothing was written. Pass bootstrap= and topic=, or a target such as "
            'to=semel.Postgres("postgresql://...", table="orders").'
        )
