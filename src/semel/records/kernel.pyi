"""Types of the compiled kernel; kernel.pyx says what each does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import Buffer

from semel.records.layout import BatchHeader

StringParts = tuple[Buffer | None, Any, Buffer]
HeaderParts = tuple[Buffer, StringParts, StringParts]

SOURCE_DIGEST: str

def read_records(
    group: list[tuple[BatchHeader, memoryview]], headers_max: int, allocate: Callable[[int], Buffer], /
) -> tuple[int, Buffer, Buffer, StringParts, StringParts, HeaderParts | None] | None: ...
def murmur2(keys: StringColumn, out: Any, /) -> None: ...

class StringColumn:
    def __init__(self, buffers: list[Any], first: int, count: int, is_wide: bool, /) -> None: ...

class Columns:
    row_count: int
    bytes_max: int
    def __init__(
        self,
        values: StringColumn,
        keys: StringColumn | None,
        timestamps: tuple[Any, ...] | None,
        headers: tuple[Any, ...] | None,
        /,
    ) -> None: ...

class Writer:
    record_count: int
    base_timestamp: int
    max_timestamp: int
    refused_bytes: int
    end: int
    def __init__(self, out: Buffer, first_byte: int, default_timestamp: int, /) -> None: ...
    def append(self, columns: Columns, first: int, /) -> int: ...
    def append_row(
        self, timestamp: int, key: bytes | None, value: bytes | None, headers: Iterable[Sequence[bytes | None]], /
    ) -> bool: ...
    def close(self) -> None: ...
