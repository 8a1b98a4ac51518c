"""The headers of change events as columns of numbers: which transaction each belongs to, and its place in it. Pure."""
# pyarrow comes without types.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.client.source_transactions import INDEX_HEADER, SOURCE_HEADER, TRANSACTION_HEADER
from semel.errors import TransactionIncomplete
from semel.records.schema import HEADERS_TYPE
from semel.session.source_assembler import EventRun

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class SourceEvents(NamedTuple):
    """Events of one source from one partition, in the order of their offsets."""

    table: pa.Table
    """In `RECORD_SCHEMA`."""
    offsets: Numbers
    transactions: Numbers
    indexes: Numbers

    def runs(self) -> list[EventRun]:
        """Cut where the transaction changes, and where the order is wrong."""
        if not len(self.offsets):
            return []
        is_cut = (np.diff(self.transactions) != 0) | (np.diff(self.indexes) <= 0)
        begins = np.concatenate(([0], np.flatnonzero(is_cut) + 1))
        lasts = np.append(begins[1:], len(self.offsets)) - 1
        return [
            EventRun(*numbers)
            for numbers in zip(
                self.transactions[begins].tolist(),
                self.offsets[begins].tolist(),
                (lasts - begins + 1).tolist(),
                self.indexes[begins].tolist(),
                self.indexes[lasts].tolist(),
                strict=True,
            )
        ]


def events_of(table: pa.Table, source: str, where: str) -> SourceEvents:
    """The records of a table in `RECORD_SCHEMA` that are events of this source; others are left out.

    `where` names the partition, for messages.
    """
    headers = pa.concat_arrays(table.column("headers").chunks) if table.num_rows else pa.array([], HEADERS_TYPE)
    rows = np.asarray(pc.list_parent_indices(headers))
    flat = pc.list_flatten(headers)
    keys, values = pc.struct_field(flat, "key"), pc.struct_field(flat, "value")
    is_own = np.zeros(table.num_rows, np.bool_)
    sources = pc.equal(keys, SOURCE_HEADER)
    is_own[rows[_true(sources)]] = pc.equal(values.filter(sources), source.encode()).fill_null(False)
    offsets = np.asarray(table.column("offset"))[is_own]
    numbers = [
        _numbers(header, keys, values, rows, is_own, offsets, where) for header in (TRANSACTION_HEADER, INDEX_HEADER)
    ]
    return SourceEvents(table if is_own.all() else table.filter(pa.array(is_own)), offsets, *numbers)


def _numbers(
    header: str, keys: pa.Array, values: pa.Array, rows: Any, is_own: Any, offsets: Numbers, where: str
) -> Numbers:
    """The value of a header for each own row. Of two headers of one name the last counts: the relay adds its own."""
    mask = pc.equal(keys, header)
    found = np.full(len(is_own), -1, np.int64)
    try:
        found[rows[_true(mask)]] = values.filter(mask).cast(pa.string()).cast(pa.int64()).fill_null(-1)
    except pa.ArrowInvalid as error:
        raise TransactionIncomplete(
            f"A record of {where} has a header {header!r} that is no number ({error}), so it belongs to no transaction "
            "of the source. Nothing of it was applied. Let only the relay write headers of this name."
        ) from error
    own = found[is_own]
    if (own < 0).any():
        raise TransactionIncomplete(
            f"{where} at offset {offsets[own < 0][0]} has the header {SOURCE_HEADER!r} and none {header!r}, so it "
            "belongs to no transaction of the source. Nothing of it was applied. Let only the relay write such headers."
        )
    return own


def _true(mask: pa.Array) -> Any:
    return np.asarray(mask.fill_null(False))
