"""`semel bench spark`: its arithmetic and its arguments, and, marked large, a run in small."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from semel.bench import run_sections, spark
from semel.bench.report import Row, Section
from semel.bench.spark_worlds import JobFailed, SparkProcess
from semel.broker.process import Broker
from semel.cli.main import app
from semel.client.producer import Producer
from semel.errors import ConfigError


def a_price(**changes: Any) -> spark.Price:
    part = {"encode_ms": 60, "write_ms": 40, "commit_ms": 10, "open_ms": 50}
    values: dict[str, Any] = {
        "noop_ms": [100, 900, 110],
        "spark_ms": [150, 160, 170],
        "semel_ms": [210, 220, 2000],
        "parts": [part, part, part],
        "paused_ms": [1000, 2000],
        "paused_parts": [{"open_ms": 100}, {"open_ms": 150}],
    }
    return spark.Price(**{**values, **changes})


def test_rates_and_ratios_come_from_the_best_seconds() -> None:
    """Ratios above 1 mean that Semel is faster; a way that was not run has no figure."""
    row = spark.compared("sink", {"semel": 2.0, "spark": 5.0, "tuned": 3.0}, 1_000)
    assert row == Row("sink", (500.0, 200.0, 1_000 / 3.0, 2.5, 1.5))
    assert spark.compared("source", {"semel": 2.0, "spark": 1.0}, 10).figures == (5.0, 10.0, None, 0.5, None)


def test_the_price_of_a_batch_is_the_median_beyond_noop() -> None:
    """One slow batch moves no figure, and the parts are told."""
    price = a_price()
    assert price.row().figures == (110, 50, None, None, None)
    [note] = price.notes()
    assert "encode 60, write 40, commit 10, open 50" in note


def test_the_worst_batch_decides_how_long_a_transaction_is_open() -> None:
    """The share is that of the batch in which it was largest."""
    assert a_price().open_share == 0.1


def test_input_has_every_row_once_and_no_two_values_alike(tmp_path: Path) -> None:
    """All files together hold the records asked for, also where they do not divide evenly."""
    spark.write_input(tmp_path / "input", 10, 4, 100, True)
    files = sorted((tmp_path / "input").iterdir())
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(files) == 4
    assert len({row["value"] for row in rows}) == len(rows) == 10
    assert {(len(row["value"]), len(row["key"])) for row in rows} == {(100, 8)}


@pytest.mark.parametrize("sizes", [{"records": 1}, {"rounds": 0}, {"singles": 0}])
def test_sizes_that_measure_nothing_are_refused(sizes: dict[str, Any]) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match="needs 8 records"):
        spark.run(**sizes)


def test_the_command_hands_its_sizes_to_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--quick`, `--records` and `--rounds` arrive; what was not given is left to the section."""
    seen: list[dict[str, Any]] = []

    def run(records: int = 7, rounds: int = 3, quick: bool = False) -> Section:
        seen.append({"records": records, "rounds": rounds, "quick": quick})
        return Section("spark", "nothing", (), (), ())

    monkeypatch.setattr(spark, "run", run)
    assert CliRunner().invoke(app, ["bench", "spark", "--quick", "--records", "9"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "spark"]).exit_code == 0
    assert seen == [{"records": 9, "rounds": 3, "quick": True}, {"records": 7, "rounds": 3, "quick": False}]


def test_a_size_that_a_section_does_not_know_is_refused() -> None:
    """Nothing runs, rather than the wrong size."""
    with pytest.raises(ConfigError, match="'checker' has no --quick"):
        run_sections("checker", quick=True)


def test_a_job_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    """What the process wrote before it ended is in the error."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nread line\necho no such jar >&2\nexit 1\n")
    python.chmod(0o755)
    process = SparkProcess(str(python), {})
    try:
        with pytest.raises(JobFailed, match=r"job version .*failed(?s:.*)no such jar"):
            process.run("version")
    finally:
        process.close()


def test_a_query_that_fails_leaves_the_process_for_the_next_one(tmp_path: Path) -> None:
    """Its error is the answer, and the next job is answered as ever."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nread line\necho \'answer {"error": "Expiring 7 record(s)"}\'\n'
        'read line\necho \'answer {"pyspark": "4"}\'\nread line\n'
    )
    python.chmod(0o755)
    process = SparkProcess(str(python), {})
    try:
        with pytest.raises(JobFailed, match=r"job sink .*failed: Expiring 7 record"):
            process.run("sink")
        assert process.run("version") == {"pyspark": "4"}
    finally:
        process.close()


class _ScriptedSpark:
    """Stands for the process with Spark: writes eight records itself, and fails in the ways that it is told."""

    def __init__(self, *failing: str) -> None:
        self._failing = failing
        self.ways: list[str] = []

    def run(self, job: str, *, way: str, bootstrap: str, topic: str, **_: Any) -> dict[str, Any]:
        assert job == "sink"
        self.ways.append(way)
        if way in self._failing:
            raise JobFailed("Expiring 7 record(s):\n\tat org.apache.kafka")
        with Producer(bootstrap_servers=bootstrap) as producer:
            producer.send_table(topic, spark.random_table(8, 100))
            producer.flush()
        return {"records": 8, "seconds": 2.0, "parts": []}


def _sink(process: _ScriptedSpark, folder: Path) -> spark.Turns:
    with Broker() as broker:
        world = spark.World(broker.bootstrap, "", cast(Any, None), cast(SparkProcess, process), folder, count())
        return world.sink(spark.MAIN, 8, 3)


def test_where_sparks_own_sink_fails_the_table_says_so_and_has_the_rest(tmp_path: Path) -> None:
    """It is not tried again, as a failure takes minutes; a row without its figures is a row."""
    process = _ScriptedSpark("kafka")
    turns = _sink(process, tmp_path)
    assert turns.best == {"semel": 2.0}
    assert turns.failures == [
        f"Spark's own sink ({name}) failed in turn 1. Expiring 7 record(s): at org.apache.kafka"
        for name in ("spark", "tuned")
    ]
    assert process.ways == ["semel", "kafka", "kafka", "semel", "semel"]
    assert spark.compared("sink", turns.best, 8).figures == (4.0, None, None, None, None)


def test_where_semels_sink_fails_there_is_no_table(tmp_path: Path) -> None:
    """A figure that leaves out failures would be worth nothing."""
    with pytest.raises(JobFailed, match="Expiring 7"):
        _sink(_ScriptedSpark("semel"), tmp_path)


@pytest.mark.large
def test_a_small_run_has_every_figure() -> None:
    """On Apache Kafka, with both Sparks and Spark's connector; figures of this size mean nothing."""
    section = spark.run(records=20_000, rounds=1, singles=3, quick=True)
    assert [row.case for row in section.rows] == [
        "sink, values of 100 B",
        "source, batch",
        "source, stream",
        "price of a micro-batch of one record, ms",
    ]
    assert all(figure is not None for figure in section.rows[0].figures)
    assert [(bar.required, bar.at_most) for bar in section.bars] == [
        (1.6, False),
        (1.1, False),
        (1.5, False),
        (1.5, False),
        (0.2, True),
    ]
    assert all(bar.measured is not None and bar.measured > 0 for bar in section.bars)
