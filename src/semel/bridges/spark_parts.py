"""What a job of Spark's has staged: parts of rows, in tables of the database, in files, or with the driver."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from semel.bridges.dead_letter_table import RefusedRow
from semel.bridges.merge import quote
from semel.bridges.spark_tables import TableOutput
from semel.spark.blobs import unpack_error
from semel.spark.spool import open_spooled


@dataclass(slots=True)
class StagedRows:
    """The rows of one output, wherever its tasks have left them."""

    output: TableOutput
    schema: pa.Schema
    tables: dict[str, int]
    """Staging tables, with how many rows each must have."""
    few: Iterable[Any]
    """Parts that the driver itself loads."""
    rows: int
    bytes: int
    refused: Sequence[RefusedRow]
    """Rows that were not staged, since no database would take them."""
    is_running: bool = False
    """Whether the job has not ended yet, so that only `few` is known: it waits for the rest."""

    def end(self, all_of_it: StagedRows) -> None:
        self.tables, self.rows, self.bytes = all_of_it.tables, all_of_it.rows, all_of_it.bytes
        self.refused, self.is_running = all_of_it.refused, False


class CountedParts:
    """Parts as they come from the tasks; raises a task's error."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._parts = parts
        self.rows = 0
        self.bytes = 0
        self.refused: list[RefusedRow] = []

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            if part.error is not None:
                raise unpack_error(part.error)
            if part.refused is not None:
                self.refused += pickle.loads(bytes(part.refused))
                continue
            self.rows += part.rows
            self.bytes += part.bytes
            yield part


def collected(output: TableOutput, schema: pa.Schema, parts: Sequence[Any]) -> StagedRows:
    counted = CountedParts(parts)
    few = [part for part in counted if part.staged is None]
    tables = {part.staged: part.rows for part in parts if part.staged is not None}
    return StagedRows(output, schema, tables, few, counted.rows, counted.bytes, counted.refused)


def batches_of(parts: Iterable[Any], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for part in parts:
        data = part.data if part.file is None else _read(part)
        yield pa.ipc.read_record_batch(pa.py_buffer(data), schema)


def _read(part: Any) -> bytes:
    """Read and not mapped, so that the driver holds one part at a time."""
    with open_spooled(part.file) as file:
        file.seek(part.at)
        return file.read(part.bytes)


def temporary_name(output: TableOutput) -> str:
    return f"semel_staged {output.name}"


def is_temporary(name: str) -> bool:
    """Whether it is the quoted name of a table that only one connection has, which may be gone."""
    return name.startswith("temp.")


def source_of(name: str) -> str:
    return name if is_temporary(name) else quote(name)
