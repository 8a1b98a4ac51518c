"""The context of a trace in the headers of records: W3C's `traceparent`, as OpenTelemetry writes it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute

from semel import traces
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE

_compute: Any = pyarrow.compute
NAME: Final = "traceparent"
Headers = Collection[tuple[str, bytes | None]]


def carried_contexts(table: pa.Table) -> list[str]:
    """The distinct contexts that records carry, as many as a span is linked to.

    >>> carried_contexts(pa.table({"value": [b"1"]}))
    []
    """
    if not traces.wants_headers() or "headers" not in table.column_names:
        return []
    found: list[str] = []
    for chunk in table.column("headers").chunks:
        headers = chunk.flatten()
        ours = headers.field("value").filter(_compute.equal(headers.field("key"), NAME))
        found += (value.decode("ascii", "replace") for value in ours.unique().to_pylist() if value is not None)
    return list(dict.fromkeys(found))[: traces.LINKS_MAX]


def with_context_row(headers: Headers) -> Headers:
    """A record's headers with the context of the span that is current, in place of another one's."""
    context = traces.carried_context()
    if context is None:
        return headers
    return [*((name, value) for name, value in headers if name != NAME), (NAME, context.encode())]


def with_context(table: pa.Table) -> pa.Table:
    """The same for all rows of a table."""
    context = traces.carried_context()
    if context is None or not table.num_rows:
        return table
    ours = pa.array([{"key": NAME, "value": context.encode()}], HEADER_TYPE)
    if "headers" not in table.column_names:
        values = ours.take(pa.array(np.zeros(table.num_rows, np.int64)))
        offsets = pa.array(np.arange(table.num_rows + 1, dtype=np.int32))
        return table.append_column("headers", pa.ListArray.from_arrays(offsets, values, type=HEADERS_TYPE))
    place = table.column_names.index("headers")
    given = pa.concat_arrays([chunk.cast(HEADERS_TYPE) for chunk in table.column(place).chunks])
    return table.set_column(place, "headers", _with_one_more(given, ours))


def _with_one_more(given: pa.ListArray, ours: pa.StructArray) -> pa.ListArray:
    """Each list without what it had of that name, and with ours at its end."""
    lengths = given.value_lengths().fill_null(0).to_numpy()
    rows = np.repeat(np.arange(len(given)), lengths)
    headers = given.flatten()
    is_kept = _compute.not_equal(headers.field("key"), NAME).to_numpy(zero_copy_only=False)
    kept = headers.filter(pa.array(is_kept))
    ends = np.cumsum(np.bincount(rows[is_kept], minlength=len(given)))
    order = np.insert(np.arange(len(kept)), ends, len(kept))
    values = pa.concat_arrays([kept, ours]).take(pa.array(order))
    offsets = np.concatenate([[0], ends + np.arange(1, len(given) + 1)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=HEADERS_TYPE)
