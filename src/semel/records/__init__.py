"""Kafka's record batches (magic 2), both ways between bytes and Arrow tables.

The names that need NumPy and Arrow are loaded when first used: a broker that only reads headers starts without them.
"""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from semel.records.control import ControlMarker, encode_control_batch, read_control_batch
from semel.records.layout import HEADER_BYTES, BatchHeader, iter_batches, read_header, verify_crc
from semel.records.stamping import stamp

if TYPE_CHECKING:
    from semel.records import reference
    from semel.records.arrow_decode import decode_batches
    from semel.records.arrow_encode import encode_table
    from semel.records.compression import DECOMPRESSED_BYTES_MAX
    from semel.records.partitioner import StickyPartitioner, partitions_for_keys, split_by_partition
    from semel.records.schema import RECORD_SCHEMA, EncodedBatch

__all__ = [
    "DECOMPRESSED_BYTES_MAX",
    "HEADER_BYTES",
    "RECORD_SCHEMA",
    "BatchHeader",
    "ControlMarker",
    "EncodedBatch",
    "StickyPartitioner",
    "decode_batches",
    "encode_control_batch",
    "encode_table",
    "iter_batches",
    "partitions_for_keys",
    "read_control_batch",
    "read_header",
    "reference",
    "split_by_partition",
    "stamp",
    "verify_crc",
]

_LOADED_ON_USE = {
    "DECOMPRESSED_BYTES_MAX": "compression",
    "RECORD_SCHEMA": "schema",
    "EncodedBatch": "schema",
    "StickyPartitioner": "partitioner",
    "decode_batches": "arrow_decode",
    "encode_table": "arrow_encode",
    "partitions_for_keys": "partitioner",
    "split_by_partition": "partitioner",
}


def __getattr__(name: str) -> object:
    if name == "reference":
        return import_module("semel.records.reference")
    module = _LOADED_ON_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
