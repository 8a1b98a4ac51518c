"""Spark's part in a streaming query, in a few lines and without a JVM: batches, tasks, checkpoint and replays.

A sink that writes to a database needs little of Spark. With this its crashes can be tried by the dozen in seconds; the
same with the real Spark is in `test_database_spark_kills.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from semel.bridges import spark_sink
from semel.spark.input_offsets import Input, parse_ends

Call = Callable[[Any, int], None]


class Frame:
    """A DataFrame: each of `parts` is the input of one task, of which `attempts` of each run to their ends."""

    isStreaming = False

    def __init__(self, parts: Sequence[pa.Table], *, attempts: int = 1, master: str = "local[2]") -> None:
        self.parts = parts
        self.schema = from_arrow_schema(parts[0].schema)
        self.runs = 0
        """How often the plan was computed."""
        self._attempts = attempts
        settings = {"spark.master": master, "spark.local.dir": ""}
        self.sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default="": settings[name]))

    def mapInArrow(self, function: Any, schema: str) -> Mapped:
        return Mapped(self, function)

    def results(self, function: Any) -> Iterator[SimpleNamespace]:
        """What the job returns: of each task the results of its last attempt."""
        self.runs += 1
        for part in self.parts:
            rows: list[SimpleNamespace] = []
            for _ in range(self._attempts):
                batches = part.to_batches(max_chunksize=1_000)
                rows = [SimpleNamespace(**row) for made in function(iter(batches)) for row in made.to_pylist()]
            yield from rows

    @property
    def write(self) -> Any:
        """The sink `noop`."""

        def save() -> None:
            self.runs += 1

        return SimpleNamespace(format=lambda name: SimpleNamespace(mode=lambda mode: SimpleNamespace(save=save)))

    def semanticHash(self) -> int:
        return id(self)


@dataclass
class Mapped:
    frame: Frame
    function: Any

    def collect(self) -> list[SimpleNamespace]:
        return list(self.frame.results(self.function))

    def toLocalIterator(self) -> Iterator[SimpleNamespace]:
        return self.frame.results(self.function)


class LocalFiles:
    """A checkpoint in a folder."""

    def read(self, path: str) -> str | None:
        return Path(path).read_text() if Path(path).exists() else None

    def write(self, path: str, text: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        beside = Path(f"{path}.new")  # as Spark does, so that a kill leaves the whole file or none
        beside.write_text(text)
        beside.rename(path)


@dataclass
class Stream:
    """One query with its checkpoint. Each call of `run` is a new run of it."""

    folder: Path
    ends: Callable[[int], str] = lambda batch: f'{{"logOffset":{batch}}}'
    """Where the input of a batch ends, as the source writes it."""
    files: LocalFiles = field(default_factory=LocalFiles)

    def __post_init__(self) -> None:
        self._run = ""
        if self.files.read(f"{self.folder}/metadata") is None:
            self.files.write(f"{self.folder}/metadata", uuid4().hex)
        self.query = self.files.read(f"{self.folder}/metadata") or ""

    def run(self, call: Call, batches: Iterable[Any]) -> int:
        """Call the sink for those of the batches that are not completed; returns for how many."""
        self._run, called = uuid4().hex, 0
        for number, df in enumerate(batches):
            if self.files.read(f"{self.folder}/commits/{number}") is None:
                self.files.write(f"{self.folder}/offsets/{number}", f"v1\n{{}}\n{self.ends(number)}")
                self._is_first = called == 0
                call(df, number)
                self.files.write(f"{self.folder}/commits/{number}", "v1\n{}")
                called += 1
        return called

    def read_input(self, df: Any, batch_id: int, checkpoint: str | None) -> Input:
        """In place of the function that asks Spark."""
        text = self.files.read(f"{self.folder}/offsets/{batch_id}") or ""
        digest = hashlib.sha256(text.encode()).hexdigest()
        return Input(
            self.query,
            self._run,
            self._is_first,
            digest,
            parse_ends(text),
            str(self.folder),
            self.files,
            lambda: self.files.read(f"{self.folder}/offsets/{batch_id - 1}") or "",
        )

    def forget_commit(self) -> None:
        """As after a crash between the sink's commit and Spark's own."""
        found = [path.name for path in (self.folder / "commits").iterdir() if path.name.isdecimal()]
        newest = max(map(int, found))
        (self.folder / "commits" / str(newest)).unlink()


def use(stream: Stream, patch: pytest.MonkeyPatch | None = None) -> None:
    """Let sinks ask this stream for their input."""
    (patch or pytest.MonkeyPatch()).setattr(spark_sink, "read_input", stream.read_input)
