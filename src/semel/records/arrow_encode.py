"""Arrow table to record batches."""
from __future__ import annotations

import pyarrow as pa

from semel.errors import RecordTooLarge
from semel.records import reference
from semel.records.compression import check_compression
from semel.records.layout import HEADER_BYTES, next_sequence
from semel.records.schema import EncodedBatch, normalise_columns


def encode_table(table, *, compression="none", compression_level=None, batch_bytes_max=1_048_576, default_timestamp_ms,
                 producer_id=-1, producer_epoch=-1, base_sequence=-1, transactional=False):
    check_compression(compression, compression_level)
    c = normalise_columns(table)
    n = c.row_count
    values = c.value.to_pylist()
    keys = c.key.to_pylist() if c.key is not None else [None] * n
    headers = c.headers.to_pylist() if c.headers is not None else [None] * n
    stamps = c.timestamp.to_pylist() if c.timestamp is not None else [None] * n
    out = []
    group, size = [], HEADER_BYTES
    sequence = base_sequence

    def flush():
        nonlocal group, size, sequence
        data = reference.encode_batch(group, compression=compression, compression_level=compression_level,
            producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=sequence, transactional=transactional)
        out.append(EncodedBatch(memoryview(bytearray(data)), len(group)))
        if sequence >= 0:
            sequence = next_sequence(sequence, len(group))
        group, size = [], HEADER_BYTES

    for i in range(n):
        ts = default_timestamp_ms if stamps[i] is None else stamps[i]
        hs = tuple((h["key"].decode("utf-8", "surrogateescape"), h["value"]) for h in headers[i] or ())
        while True:
            record = reference.Record(len(group), ts, keys[i], values[i], hs)
            body = bytearray()
            reference.write_record(body, record, 0, group[0].timestamp_ms if group else ts)
            if size + len(body) <= batch_bytes_max:
                break
            if not group:
                raise RecordTooLarge(f"Row {i} {len(body)} {batch_bytes_max}")
            flush()
        group.append(record)
        size += len(body)
    if group:
        flush()
    return out
