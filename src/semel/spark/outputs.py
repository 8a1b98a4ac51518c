"""Several DataFrames of one micro-batch or job, put together so that they become one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from semel.errors import ConfigError
from semel.spark.columns import record_columns
from semel.spark.rows import PlainRows, Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BY_COLUMN: Final = "*"
"""The output whose rows name their topics."""
_COLUMNS: Final = {
    "value": "binary",
    "key": "binary",
    "topic": "string",
    "partition": "int",
    "headers": "array<struct<key:string,value:binary>>",
}


@dataclass(frozen=True, slots=True)
class Output:
    """One write: its rows, and where they go."""

    name: str
    """What the ledger calls it: its topic, with a number where a batch writes to one topic several times."""
    rows: Rows
    topic: str | None
    """None if the rows name their topics."""


def name_output(topic: str | None, earlier: Sequence[Output]) -> str:
    """The name for one more write of a batch. It is the same in a replay, which makes the same writes.

    >>> name_output("even", [])
    'even'
    """
    base = BY_COLUMN if topic is None else topic
    count = Counter(output.topic for output in earlier)[topic]
    return base if count == 0 else f"{base}#{count + 1}"


def check_same_kind(name: str, written: Collection[str], missing: Sequence[str]) -> None:
    """Refuse a replay that would write by topic what may have been written by column, or the other way round."""
    was_by_column = {output.startswith(BY_COLUMN) for output in written}
    for output in missing:
        if (not output.startswith(BY_COLUMN)) in was_by_column:
            raise ConfigError(
                f"Pipeline {name!r} has written a part of this batch ({', '.join(sorted(written))}; * stands for a "
                f"column `topic`), and the program now asks for {output!r}: whether its rows are among those "
                "cannot be told. Nothing was written. Name the topics as before until this batch is done, or pass "
                'resume="checkpoint" once to write them in any case.'
            )


def combine(outputs: Sequence[Output]) -> tuple[Rows, str | None]:
    """The rows of all outputs, and their topic if it is one for all and not in a column."""
    if len(outputs) == 1:
        return outputs[0].rows, outputs[0].topic
    present = {"value", "topic"}
    for output in outputs:
        present |= set(record_columns(output.rows.df.schema, output.topic))
    columns = [name for name in _COLUMNS if name in present]
    parts = [_with_columns(output.rows.df, output.topic, columns) for output in outputs]
    return PlainRows(reduce(lambda left, right: left.unionByName(right), parts)), None


def named_topics(outputs: Sequence[Output]) -> list[str]:
    """The topics that the program names for these outputs, each once."""
    return list(dict.fromkeys(output.topic for output in outputs if output.topic is not None))


def _with_columns(df: DataFrame, topic: str | None, columns: Sequence[str]) -> DataFrame:
    from pyspark.sql import functions

    there = record_columns(df.schema, topic)
    chosen = []
    for name in columns:
        if name == "topic" and topic is not None:
            column = functions.lit(topic)
        elif name in there:
            column = functions.col(name)
        else:
            column = functions.lit(None)
        chosen.append(column.cast(_COLUMNS[name]).alias(name))
    return df.select(*chosen)
