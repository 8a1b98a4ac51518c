"""From batches of the source to the records of one cut: decoded, marked with their origin, and without loops. No IO."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from semel.bridges.mirror.options import ORIGIN_HEADER
from semel.bridges.mirror.progress import Run
from semel.client.fetched import cut_to_window
from semel.client.sender import Stored
from semel.records import decode_batches
from semel.records.schema import HEADER_TYPE, HEADERS_TYPE

pc: Any = pyarrow.compute


class Copied(NamedTuple):
    """Records for the target, the source offset of each, and how many were left out because they came from there."""

    table: pa.Table
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    loops: int


def copy_batches(
    batches: Sequence[memoryview], start: int, end: int, *, source_cluster: str, target_cluster: str
) -> Copied:
    """The records of one partition from `start` up to `end`, as they go to the target."""
    table = cut_to_window(decode_batches(batches), start, end)
    headers = _one_array(table.column("headers"))
    is_loop = _came_from(headers, target_cluster)
    loops = int(is_loop.sum())
    if loops:
        table = table.filter(pa.array(~is_loop))
        headers = _one_array(table.column("headers"))
    offsets = table.column("offset").to_numpy()
    copied = pa.table(
        {
            "key": table.column("key"),
            "value": table.column("value"),
            "timestamp": table.column("timestamp"),
            "headers": _with_origin(headers, source_cluster),
        }
    )
    return Copied(copied, offsets, loops)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    return pa.concat_arrays(chunks) if chunks else pa.array([], column.type)


def _came_from(headers: pa.Array, cluster: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records have been through this cluster already."""
    is_loop = np.zeros(len(headers), bool)
    flat = pc.list_flatten(headers)
    if not len(flat):
        return is_loop
    is_origin = pc.equal(pc.struct_field(flat, [0]), ORIGIN_HEADER)
    is_target = pc.equal(pc.struct_field(flat, [1]), pa.scalar(cluster.encode(), pa.binary()))
    found = pc.fill_null(pc.and_(is_origin, is_target), False)
    parents = pc.list_parent_indices(headers)
    is_loop[pc.filter(parents, found).to_numpy(zero_copy_only=False)] = True
    return is_loop


def _with_origin(headers: pa.Array, cluster: str) -> pa.Array:
    """Each record's headers with one more at the end: where the record was read."""
    count = len(headers)
    origin = pa.array([{"key": ORIGIN_HEADER, "value": cluster.encode()}], HEADER_TYPE)
    lengths = pc.fill_null(pc.list_value_length(headers), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths + 1)
    flat = pc.list_flatten(headers)
    places = np.full(count + len(flat), len(flat), np.int64)
    is_own = np.ones(len(places), bool)
    is_own[ends - 1] = False
    places[is_own] = np.arange(len(flat))
    values = pa.concat_arrays([flat.cast(HEADER_TYPE), origin]).take(pa.array(places))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, values).cast(HEADERS_TYPE)


def make_runs(offsets: np.ndarray[Any, np.dtype[np.int64]], stored: Sequence[Stored]) -> tuple[Run, ...]:
    """Which target offset each source offset has got. `stored` is the batches of this partition, in their order.

    >>> make_runs(np.array([0, 1, 5, 6]), [Stored("t", 0, 10, 3), Stored("t", 0, 14, 1)])
    (Run(source=0, target=10, count=2), Run(source=5, target=12, count=1), Run(source=6, target=14, count=1))
    """
    if not len(offsets):
        return ()
    targets = np.concatenate([np.arange(one.base_offset, one.base_offset + one.record_count) for one in stored])
    breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(targets) != 1)) + 1
    firsts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([firsts, [len(offsets)]]))
    return tuple(
        Run(int(offsets[first]), int(targets[first]), int(count)) for first, count in zip(firsts, counts, strict=True)
    )
