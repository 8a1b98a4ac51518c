"""What clients did and what they were told, as rows of one fixed shape: written by many processes, read as arrays.

A row is written when an operation begins (`Phase.INVOKE`) and when its end is known. Each process has a file of its
own, and a row is in the kernel's hands before the operation that it announces leaves the process: a `kill -9` loses no
row that matters, at most it tears the last one, which the reader drops.

Records are told apart by `origin` and `sequence`, which they carry in their payload (see `payload.py`). A copy of a
record in another topic keeps both; who wrote the copy, and in which of its transactions, is in `writer` and
`transaction`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt


class Act(IntEnum):
    """What an operation does. `partition` is a number of `Manifest.partitions`."""

    BEGIN = 1
    """Open a transaction: `transaction` counts those of this process from 0."""
    SEND = 2
    """Write a record to `partition` (-1: the client chooses), inside `transaction` (-1: none). Ok tells `offset`."""
    CONSUME = 3
    """Take a record at `offset` of `partition` as input of this process's `transaction`; `writer` wrote it."""
    POSITION = 4
    """Put the next `offset` to read of `partition` into `transaction`, as its group's position."""
    COMMIT = 5
    """End `transaction`. Fail means that it is known to be aborted."""
    ABORT = 6
    """End `transaction`; also of a process that gives up without asking the broker."""
    ASSIGN = 7
    """Begin to read `partition` at `offset`: what was read before says nothing about what comes next."""
    READ = 8
    """Got the record at `offset` of `partition` that `writer` wrote in its `transaction`. Fail: not a sound payload."""
    ENDS = 9
    """At the end of the run: the last stable offset of `partition` is `offset`, and its high watermark is `value`."""


class Phase(IntEnum):
    INVOKE = 0
    OK = 1
    FAIL = 2
    """It did not happen and never will."""
    UNKNOWN = 3
    """It may have happened, or may happen yet. An INVOKE without an end means the same."""


ROW: Final = np.dtype(
    [
        ("time_ns", "<i8"),  # of the machine's monotonic clock, which all its processes share
        ("offset", "<i8"),
        ("value", "<i8"),  # what the workload means by it: a key, an amount, a total
        ("process", "<i4"),  # who acts: a number of `Manifest.processes`
        ("writer", "<i4"),
        ("transaction", "<i4"),
        ("origin", "<i4"),
        ("sequence", "<i4"),
        ("partition", "<i2"),
        ("act", "u1"),
        ("phase", "u1"),
    ]
)
"""48 bytes. What a row has no use for is -1."""

Rows = npt.NDArray[Any]
"""An array of `ROW`."""

Isolation = Literal["read_committed", "read_uncommitted"]


@dataclass(frozen=True)
class Process:
    """One life of a client: who is started again after a kill is another process."""

    number: int
    name: str
    role: Literal["writer", "reader", "judge"]
    isolation: Isolation = "read_committed"


@dataclass(frozen=True)
class Aggregate:
    """The records of `output` hold, in `value`, the running total of those in `input` with the same `origin`."""

    input: str
    output: str
    of: Literal["count", "sum"]


@dataclass
class Manifest:
    """What the numbers in a history stand for, and what was asked of the pipeline."""

    partitions: list[tuple[str, int]]
    processes: list[Process] = field(default_factory=list[Process])
    copies: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Input and output topic: each committed record of the first must be in the second, once."""
    aggregates: list[Aggregate] = field(default_factory=list[Aggregate])
    zero_sum_topics: list[str] = field(default_factory=list[str])
    """The `value`s of each transaction in these topics, and so of all that is visible, add up to nothing."""
    keyed_topics: list[str] = field(default_factory=list[str])
    """Topics in which `value` is the key of a record: what one origin sent with one key must be read in that order."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        fields = json.loads(path.read_text())
        return cls(
            partitions=[(topic, index) for topic, index in fields["partitions"]],
            processes=[Process(**one) for one in fields["processes"]],
            copies=[(source, target) for source, target in fields["copies"]],
            aggregates=[Aggregate(**one) for one in fields["aggregates"]],
            zero_sum_topics=fields["zero_sum_topics"],
            keyed_topics=fields["keyed_topics"],
        )


class HistoryWriter:
    """Appends the rows of one process to its file. Rows wait until `flush`, to be called before what they announce.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with HistoryWriter(Path(folder) / "0.rows", process=0) as history:
    ...         history.note(Act.BEGIN, Phase.OK, time_ns=5, transaction=0)
    ...     [rows] = read_rows(Path(folder) / "0.rows")
    >>> rows["time_ns"].tolist(), rows["transaction"].tolist(), rows["offset"].tolist()
    ([5], [0], [-1])
    """

    def __init__(self, path: Path, *, process: int) -> None:
        self._process = process
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._waiting: list[tuple[int, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(
        self,
        act: Act,
        phase: Phase,
        *,
        time_ns: int,
        partition: int = -1,
        offset: int = -1,
        writer: int = -1,
        transaction: int = -1,
        origin: int = -1,
        sequence: int = -1,
        value: int = -1,
    ) -> None:
        """Take one row."""
        self._waiting.append(
            (time_ns, offset, value, self._process, writer, transaction, origin, sequence, partition, act, phase)
        )

    def note_rows(self, rows: Rows) -> None:
        """Take many rows at once, behind those that wait; `process` is filled in."""
        self.flush()
        rows["process"] = self._process
        _write_all(self._descriptor, rows.tobytes())

    def flush(self) -> None:
        """Return when what was noted outlives this process."""
        if self._waiting:
            _write_all(self._descriptor, np.array(self._waiting, ROW).tobytes())
            self._waiting.clear()

    def close(self) -> None:
        self.flush()
        os.close(self._descriptor)


def make_rows(count: int, act: Act, phase: Phase, **columns: npt.ArrayLike) -> Rows:
    """Rows with the given columns, and -1 in the others.

    >>> make_rows(2, Act.READ, Phase.OK, offset=[7, 8], partition=0)["offset"].tolist()
    [7, 8]
    """
    rows = np.full(count, -1, np.int8).astype(ROW)
    rows["act"], rows["phase"] = act, phase
    for name, values in columns.items():
        rows[name] = values
    return rows


def read_rows(path: Path, rows_at_once: int = 1 << 18) -> Iterator[Rows]:
    """The rows of one process in the order in which it wrote them, a part at a time; a torn last one is left out."""
    with path.open("rb") as file:
        while True:
            data = file.read(rows_at_once * ROW.itemsize)
            whole = len(data) // ROW.itemsize
            if whole == 0:
                return
            yield np.frombuffer(data, ROW, whole)


@dataclass(frozen=True)
class History:
    """The rows of all processes, each process's in its own order. `parts` can be gone through again and again."""

    manifest: Manifest
    sources: Sequence[Path | Rows]
    """A file or an array for each process."""

    @classmethod
    def in_folder(cls, folder: Path) -> Self:
        """As a run leaves it behind: `manifest.json`, and `<number>.rows` for each process."""
        manifest = Manifest.load(folder / "manifest.json")
        files = [folder / f"{one.number}.rows" for one in manifest.processes]
        return cls(manifest, [file for file in files if file.exists()])

    def parts(self) -> Iterator[Rows]:
        """All rows. A part is of one process, and the parts of a process follow each other."""
        for source in self.sources:
            if isinstance(source, Path):
                yield from read_rows(source)
            else:
                yield source


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
