"""Mutated batches and damaged columns for the compiled kernel, which may refuse them and do nothing else.

As a program it runs a kernel that was built with sanitizers (`make fuzz`): `kernel_fuzzing.py MODULE COUNT SEED`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from semel.errors import CorruptRecords, RecordTooLarge
from semel.records import reference
from semel.records.layout import HEADER_BYTES, BatchHeader, read_header
from semel.records.reference import Record

BYTES_MAX = 64 * 1024
HEADERS_MAX = BYTES_MAX // 128
INTERESTING = (0, 1, 2, 3, 0x0F, 0x10, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
NUMBERS = (0, 1, 2, 7, 100, 2**15, 2**31 - 1, -1, -2, -(2**31), 2**63 - 1, -(2**63))
PORTION = 100_000  # with a seed of its own
JUDGED_EVERY = 8  # so often the reference codec is asked as well, which takes several times as long


def exact(data: bytes | int) -> Any:
    """A buffer without a byte to spare, so that a sanitizer sees the first one that does not belong to it."""
    size = data if isinstance(data, int) else len(data)
    buffer = (ctypes.c_ubyte * size)()
    if isinstance(data, bytes):
        ctypes.memmove(buffer, data, size)
    return buffer


def fuzz(kernel: Any, rng: random.Random, count: int, *, judged_every: int = JUDGED_EVERY) -> Counter[str]:
    """Give the kernel so many mutated batches, and a damaged table for every tenth; returns what came of them.

    Every `judged_every`th batch must be refused or read exactly as the reference codec does it.
    """
    samples = [_sample(rng) for _ in range(50)]
    outcomes: Counter[str] = Counter()
    for number in range(count):
        if number % 2_000 == 0:
            samples[rng.randrange(len(samples))] = _sample(rng)
        header, body = _mutated(rng, samples)
        group = [(header, exact(body))]
        if rng.random() < 0.1:
            group.append((samples[0][0], exact(samples[0][1])))
        columns = kernel.read_records(group, HEADERS_MAX, exact)
        outcomes["refused" if columns is None else "read"] += 1
        if number % judged_every == 0 and len(group) == 1:
            assert _rows(columns) == _judgement(header, body), (header, body.hex())
        if number % 10 == 0:
            outcomes[_write_damaged(kernel, rng)] += 1
    return outcomes


def _sample(rng: random.Random) -> tuple[BatchHeader, bytes]:
    def text(longest: int) -> bytes | None:
        return rng.choice((None, b"", rng.randbytes(rng.randint(0, longest))))

    records = [
        Record(
            number,
            rng.choice((1000 + number, rng.randrange(-(2**63), 2**63))),
            text(20),
            text(rng.choice((10, 150))),
            tuple(("h" * rng.randrange(4), text(12)) for _ in range(rng.choice((0, 0, 0, 1, 3)))),
        )
        for number in range(rng.choice((1, 1, 2, 5, 20)))
    ]
    batch = reference.encode_batch(records)
    return read_header(batch), batch[HEADER_BYTES:]


def _mutated(rng: random.Random, samples: list[tuple[BatchHeader, bytes]]) -> tuple[BatchHeader, bytes]:
    header, original = samples[rng.randrange(len(samples))]
    body = bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(body) + 1)
        way = rng.randrange(8)
        if way <= 2 and at < len(body):
            body[at] ^= 1 << rng.randrange(8)
        elif way == 3 and at < len(body):
            body[at] = INTERESTING[rng.randrange(len(INTERESTING))]
        elif way == 4:
            body[at:at] = rng.randbytes(rng.randint(1, 6))
        elif way == 5:
            del body[at : at + rng.randint(1, 6)]
        elif way == 6:
            del body[at:]
        else:
            other = samples[rng.randrange(len(samples))][1]
            body[at:] = other[rng.randrange(len(other) + 1) :]
    if rng.random() < 0.2:
        field = rng.choice(("record_count", "last_offset_delta", "base_timestamp", "max_timestamp", "attributes"))
        most = {"record_count": 31, "last_offset_delta": 31, "attributes": 4}.get(field, 63)
        value = min(max(NUMBERS[rng.randrange(len(NUMBERS))], -(2**most)), 2**most - 1)
        header = header._replace(**{field: value})
    if rng.random() < 0.2:
        header = header._replace(record_count=max(header.record_count + rng.randint(-1, 1), 0))
    return header, bytes(body)


Row = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def _judgement(header: BatchHeader, body: bytes) -> list[Row] | None:
    """What the reference codec makes of it; None if it is refused."""
    if header.record_count < 0:
        return None  # found before the records are looked at
    try:
        records = reference.decode_body(header, memoryview(body), BYTES_MAX)
    except (CorruptRecords, RecordTooLarge):
        return None
    return [(one.offset, one.timestamp_ms, one.key, one.value, one.headers) for one in records]


def _rows(columns: Any) -> list[Row] | None:
    if columns is None:
        return None
    count, offsets, timestamps, keys, values, headers = columns
    pairs: list[Any] = [()] * count
    if headers is not None:
        ends, names, contents = headers
        bounds = memoryview(ends).cast("B").cast("i")
        flat = zip(
            [(name or b"").decode("utf-8", errors="replace") for name in _strings(names, bounds[-1])],
            _strings(contents, bounds[-1]),
            strict=True,
        )
        each = list(flat)
        pairs = [tuple(each[bounds[row] : bounds[row + 1]]) for row in range(count)]
    numbers = (list(memoryview(column).cast("B").cast("q")) for column in (offsets, timestamps))
    return list(zip(*numbers, _strings(keys, count), _strings(values, count), pairs, strict=True))


def _strings(parts: Any, count: int) -> list[bytes | None]:
    validity, ends, data = parts
    bounds, content = memoryview(ends).cast("B").cast("i"), bytes(data)
    present = [validity is None or bool(bytes(validity)[row >> 3] >> (row & 7) & 1) for row in range(count)]
    return [content[bounds[row] : bounds[row + 1]] if present[row] else None for row in range(count)]


def _write_damaged(kernel: Any, rng: random.Random) -> str:
    """Columns whose offsets and counts may lie, into a buffer that may be too small."""
    count = rng.choice((0, 1, 3, 9))
    try:
        values, keys = _column(kernel, rng, count), _column(kernel, rng, rng.choice((count,) * 12 + (2,)))
        kernel.murmur2(keys, exact(rng.choice((4 * count,) * 12 + (3,))))
        timestamps = headers = None
        if rng.random() < 0.5:
            timestamps = (*_bits(rng, count), exact(rng.randbytes(8 * count)), rng.choice((0,) * 12 + (1, -1)))
        if rng.random() < 0.5:
            total = rng.choice((0, 2, 5))
            names, contents = _column(kernel, rng, total), _column(kernel, rng, rng.choice((total,) * 8 + (1,)))
            headers = (*_bits(rng, count), _ends(rng, count, total, 4), 0, names, contents)
        columns = kernel.Columns(values, keys, timestamps, headers)
        room = rng.choice((0, 60, 61, 70, 100, 1000, max(columns.bytes_max, 0) + HEADER_BYTES))
        writer = kernel.Writer(exact(min(room, BYTES_MAX)), rng.choice((0, HEADER_BYTES)), NUMBERS[rng.randrange(5)])
        first = 0
        while taken := writer.append(columns, first):
            first += taken
        writer.append_row(rng.choice(NUMBERS), rng.choice((None, b"key")), b"value" * rng.randrange(20), [(b"h", None)])
        return "columns written"
    except ValueError:
        return "columns refused"


def _column(kernel: Any, rng: random.Random, count: int) -> Any:
    is_wide = rng.random() < 0.3
    size = rng.choice((0, 10, 100))
    ends = _ends(rng, count, size, 8 if is_wide else 4)
    return kernel.StringColumn([*_bits(rng, count), ends, exact(rng.randbytes(size))], 0, count, is_wide)


def _ends(rng: random.Random, count: int, last: int, width: int) -> Any:
    """Offsets of so many strings or lists; now and then one of them lies, or there are too few."""
    ends = sorted(rng.randint(0, last) for _ in range(count + 1))
    if rng.random() < 0.1:
        ends[rng.randrange(len(ends))] = min(
            max(rng.choice(NUMBERS), -(2 ** (8 * width - 1))), 2 ** (8 * width - 1) - 1
        )
    packed = b"".join(end.to_bytes(width, "little", signed=True) for end in ends)
    return exact(packed[: len(packed) - rng.choice((0,) * 20 + (1, width))])


def _bits(rng: random.Random, count: int) -> list[Any]:
    size = max((count + 7) // 8 - rng.choice((0,) * 20 + (1,)), 0)
    return [rng.choice((None, exact(rng.randbytes(size))))]


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("semel.records.kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: str, count: str, seed: str) -> None:
    kernel, left, done = _load(Path(path)), int(count), Counter[str]()
    began = time.monotonic()
    for part in itertools.count():
        taken = min(left, PORTION)
        left -= taken
        done += fuzz(kernel, random.Random(f"{seed}-{part}"), taken)
        if left == 0 or part % 10 == 9:
            said = ", ".join(f"{number:,} {what}" for what, number in sorted(done.items()))
            tried = done["read"] + done["refused"]
            print(
                f"seed {seed}: {tried:,} mutated batches in {time.monotonic() - began:.0f} s, no finding: {said}",
                flush=True,
            )
        if left == 0:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
