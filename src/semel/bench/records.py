"""The Arrow codec of record batches beside aiokafka's compiled one.

aiokafka's codec is the quickest that Python has: compiled, one call per record. Contenders take turns, each with all
records in one run, and the best run of each counts, because other work on the machine only ever adds time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

from semel.bench.report import Bar, Row, Section
from semel.errors import CorruptRecords
from semel.records import decode_batches, encode_table, iter_batches

COLUMNS = tuple(
    column
    for way in ("encode", "decode")
    for column in (way, f"{way} median", f"aiokafka {way}", f"aiokafka {way} median", f"{way} x")
)
TIMED = (
    "Nanoseconds a record, in the best run over all records and in the median of the runs; ratios are of the best. "
    "Batches of 1 MB, checksums computed and checked by both. Encode: a table, or ready-made Python objects, to "
    "batches that are all held at the end. Decode: one batch after another to a table, or to records of which key, "
    "value, offset, timestamp and headers are touched, and dropped before the next; in 'kept' all decoded records are "
    "held at the end."
)
BATCH_BYTES = 1_048_576
CODEC_NUMBERS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
MAIN_CASE = "8 B keys, 100 B values"
RAGGED_CASE = "ragged values, 20..180 B"
HEADERS_CASE = "two headers each"
RATIOS_REQUIRED = {MAIN_CASE: (3.0, 6.0), RAGGED_CASE: (6.0, 6.0), HEADERS_CASE: (4.0, 4.0)}
"""For encoding and decoding."""

Contender = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    table: pa.Table
    compression: str = "none"
    rounds: int = 7


def run(record_count: int = 200_000) -> Section:
    """Measure all cases; fewer records make it quick and the figures meaningless."""
    peer = _aiokafka()
    rows: list[Row] = []
    bars: list[Bar] = []
    for case in _cases(record_count):
        figures = _measure(case, peer)
        rows.append(Row(case.name, figures))
        for way, required in zip(("encode", "decode"), RATIOS_REQUIRED.get(case.name, ()), strict=False):
            bars.append(Bar(f"{way}, {case.name}", required, figures[COLUMNS.index(f"{way} x")]))
        if case.name == MAIN_CASE:
            rows.append(Row(f"{case.name}, kept", _measure_kept(case, peer)))
    notes = ["gzip: aiokafka packs at level 9, Semel at 6."]
    if peer is None:
        notes = ["aiokafka is not installed, so nothing was compared: pip install aiokafka"]
    return Section("records", TIMED, COLUMNS, tuple(rows), tuple(bars), tuple(notes))


def _cases(record_count: int) -> list[Case]:
    few = max(record_count // 4, 1)
    cases = [
        Case(MAIN_CASE, _table(record_count, lambda rng: rng.randbytes(100)), rounds=40),
        Case("10 B values", _table(record_count, lambda rng: rng.randbytes(10))),
        Case("1,000 B values", _table(few, lambda rng: rng.randbytes(1000))),
        Case(RAGGED_CASE, _table(record_count, lambda rng: rng.randbytes(rng.randint(20, 180))), rounds=15),
        Case("ragged text, 50..150 B", _table(record_count, lambda rng: _text(rng, rng.randint(50, 150)))),
        Case(HEADERS_CASE, _table(few, lambda rng: rng.randbytes(100), with_headers=True), rounds=15),
    ]
    text = _table(few, lambda rng: _text(rng, 100))
    return cases + [Case(f"text, {name}", text, name, rounds=3 if name == "gzip" else 7) for name in CODEC_NUMBERS]


def _table(count: int, value: Callable[[random.Random], bytes], *, with_headers: bool = False) -> pa.Table:
    rng = random.Random(1)
    columns: dict[str, Any] = {
        "key": [b"%08d" % index for index in range(count)],
        "value": [value(rng) for _ in range(count)],
        # A busy producer: half a million records a second.
        "timestamp": [1_700_000_000_000 + index // 500 for index in range(count)],
    }
    if with_headers:
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        headers = [
            [{"key": "trace", "value": b"%d" % index}, {"key": "kind", "value": b"order"}] for index in range(count)
        ]
        columns["headers"] = pa.array(headers, kind)
    return pa.table(columns)


def _text(rng: random.Random, size: int) -> bytes:
    name = rng.choice(("Ada", "Grace", "Edsger", "Barbara"))
    text = f'{{"id": {rng.randrange(10**9)}, "name": "{name}", "amount": {rng.randrange(10**4)}, "note": "'
    return (text + "lorem ipsum " * 10)[: size - 2].encode() + b'"}'


def _measure(case: Case, peer: Any) -> tuple[float | None, ...]:
    data = b"".join(
        batch.data for batch in encode_table(case.table, default_timestamp_ms=0, compression=case.compression)
    )
    contenders: dict[str, Contender] = {
        "encode": lambda: encode_table(case.table, default_timestamp_ms=0, compression=case.compression),
        "decode": lambda: _decode_and_drop(data),
    }
    if peer is not None and peer.can(case.compression):
        rows = peer.rows(case.table)
        contenders["peer encode"] = lambda: peer.encode(rows, case.compression)
        contenders["peer decode"] = lambda: peer.decode(data, keep=False)
    return _figures(_timed(contenders, case.rounds, case.table.num_rows))


def _measure_kept(case: Case, peer: Any) -> tuple[float | None, ...]:
    data = b"".join(batch.data for batch in encode_table(case.table, default_timestamp_ms=0))
    contenders: dict[str, Contender] = {"decode": lambda: decode_batches(data)}
    if peer is not None:
        contenders["peer decode"] = lambda: peer.decode(data, keep=True)
    return _figures(_timed(contenders, case.rounds // 3 + 1, case.table.num_rows))


def _timed(contenders: dict[str, Contender], rounds: int, record_count: int) -> dict[str, list[float]]:
    """Nanoseconds a record of each contender in each run."""
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            result = contender()
            runs[name].append((time.perf_counter() - begin) * 1e9 / record_count)
            del result
    return runs


def _figures(runs: dict[str, list[float]]) -> tuple[float | None, ...]:
    figures: list[float | None] = []
    for name in ("encode", "decode"):
        best: list[float] = []
        for contender in (name, f"peer {name}"):
            taken = runs.get(contender)
            best += [min(taken)] if taken else []
            figures += [min(taken), median(taken)] if taken else [None, None]
        figures.append(best[1] / best[0] if len(best) == 2 else None)
    return tuple(figures)


def _decode_and_drop(data: bytes) -> None:
    for batch in iter_batches(data):
        decode_batches([batch])


def _aiokafka() -> Any:
    try:
        return _Aiokafka()
    except ImportError:
        return None


class _Aiokafka:
    """aiokafka's compiled builder and reader, used the way its producer and fetcher do."""

    def __init__(self) -> None:
        from aiokafka import codec
        from aiokafka.record._crecords import DefaultRecordBatchBuilder, MemoryRecords

        self._builder: Any = DefaultRecordBatchBuilder
        self._memory_records: Any = MemoryRecords
        self._codec = codec

    def can(self, compression: str) -> bool:
        return compression == "none" or bool(getattr(self._codec, f"has_{compression}")())

    def rows(self, table: pa.Table) -> list[tuple[Any, ...]]:
        """Ready-made Python objects, so that only the building is timed."""
        headers: list[Any] = [[]] * table.num_rows
        if "headers" in table.column_names:
            headers = [[(header["key"], header["value"]) for header in row] for row in table["headers"].to_pylist()]
        columns = (table[name].to_pylist() for name in ("timestamp", "key", "value"))
        return list(zip(*columns, headers, strict=True))

    def encode(self, rows: list[tuple[Any, ...]], compression: str) -> list[bytes]:
        batches: list[bytes] = []
        builder = self._new_builder(compression)
        offset = 0
        for timestamp, key, value, headers in rows:
            if builder.append(offset, timestamp, key, value, headers) is None:
                batches.append(builder.build())
                builder = self._new_builder(compression)
                builder.append(0, timestamp, key, value, headers)
                offset = 0
            offset += 1
        batches.append(builder.build())
        return batches

    def _new_builder(self, compression: str) -> Any:
        return self._builder(2, CODEC_NUMBERS[compression], 0, -1, -1, -1, BATCH_BYTES)

    def decode(self, data: bytes, *, keep: bool) -> list[Any]:
        kept: list[Any] = []
        memory_records = self._memory_records(data)
        while memory_records.has_next():
            batch = memory_records.next_batch()
            if not batch.validate_crc():
                raise CorruptRecords("aiokafka finds a checksum wrong in a batch that was just encoded.")
            if keep:
                kept.append(list(batch))
                continue
            for record in batch:
                _ = record.key
                _ = record.value
                _ = record.offset
                _ = record.timestamp
                _ = record.headers
        return kept
