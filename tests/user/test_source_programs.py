"""Spark programs that read a busy topic with `format("semel")`, restarted in the middle, counted by another client."""

from __future__ import annotations

import json
import re
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
from busy_scene import Scene, assert_exactly, since_a_latest_start, spark_files

pytestmark = pytest.mark.user

SINKS = ("parquet", "console", "foreach")


def archived(scene: Scene, folder: str) -> list[int]:
    """The order numbers in what a streaming query has committed to a folder."""
    return [
        json.loads(value)["id"]
        for file in spark_files(scene.folder / folder)
        for value in pq.read_table(file)["value"].to_pylist()
    ]


def shown(scene: Scene) -> list[int]:
    """The order numbers on the console. A batch that is shown again after a restart must be the same batch."""
    log = scene.log_of("three_sinks_from_now_on.py")
    batches: dict[str, list[int]] = {}
    for number, text in re.findall(r"^Batch: (\d+)\n(.*?)(?=^Batch:|\Z)", log, re.MULTILINE | re.DOTALL):
        rows = [int(row) for row in re.findall(r"^\|(\d+) *\|$", text, re.MULTILINE)]
        first = batches.get(number, [])  # it may have been cut off in the middle
        assert rows[: len(first)] == first, f"batch {number} changed"
        batches[number] = rows
    return [row for rows in batches.values() for row in rows]


def test_a_notebook_watches_in_memory_twice(scene: Scene) -> None:
    """Two queries one after the other in one session, each from its own now on."""
    scene.create("orders")
    writer = scene.write("orders")
    before = {"first": scene.ends("orders")}
    program = scene.start("notebook_memory.py")

    def looks_again() -> bool:
        ends = scene.ends("orders")
        if "watching again" not in program.said:
            before["second"] = ends  # read before it began
            return False
        return True

    scene.wait(looks_again, "the first look", program)
    assert program.wait() == 0, program.said
    writer.finish()
    seen = json.loads((scene.folder / "seen.json").read_text())
    orders = scene.read("orders")
    for look, ends in before.items():
        shown = set(seen[look])
        last = {record.partition: record.offset for record in orders if record.order["id"] in shown}
        until_its_stop = [record for record in orders if record.offset <= last.get(record.partition, -1)]
        assert_exactly(seen[look], since_a_latest_start(seen[look], until_its_stop, ends))


def test_three_archives_begin_where_they_should(scene: Scene) -> None:
    """earliest, JSON offsets and a timestamp in one application, killed with kill -9."""
    scene.create("orders")
    writer = scene.write("orders")
    offsets = {"0": 20, "1": 35}
    since_ms = int(time.time() * 1000)

    def found() -> list[tuple[str, int]]:
        return [(name, number) for name in ("everything", "from-offsets", "since") for number in archived(scene, name)]

    def expected() -> list[tuple[str, int]]:
        orders = scene.read("orders")
        return [
            *(("everything", record.order["id"]) for record in orders),
            *(("from-offsets", r.order["id"]) for r in orders if r.offset >= offsets[str(r.partition)]),
            *(("since", record.order["id"]) for record in orders if record.timestamp_ms >= since_ms),
        ]

    scene.through_a_restart(
        writer,
        lambda: scene.start("three_starts.py", json.dumps(offsets), str(since_ms)),
        stop="kill",
        found=found,
        expected=expected,
        enough=600,
    )


def test_parquet_the_console_and_a_foreach_writer_with_the_default_start(scene: Scene) -> None:
    """Spark's guide with one word changed: nothing from before the start, all that came after it; SIGTERM."""
    scene.create("orders")
    writer = scene.write("orders")
    before = scene.ends("orders")

    def rows() -> list[int]:
        files = (scene.folder / "rows").glob("*.txt")
        return [json.loads(line)["id"] for file in files for line in file.read_text().splitlines()]

    def found() -> list[tuple[str, int]]:
        results = {"parquet": archived(scene, "archive"), "console": shown(scene), "foreach": rows()}
        return [(sink, number) for sink, numbers in results.items() for number in numbers]

    def expected() -> list[tuple[str, int]]:
        orders = scene.read("orders")
        results = {sink: [number for name, number in found() if name == sink] for sink in SINKS}
        return [
            (sink, number)
            for sink, numbers in results.items()
            for number in since_a_latest_start(numbers, orders, before)
        ]

    scene.through_a_restart(
        writer,
        lambda: scene.start("three_sinks_from_now_on.py"),
        stop="terminate",
        found=found,
        expected=expected,
        is_progress=lambda: all(Counter(name for name, _ in found())[sink] >= 50 for sink in SINKS),
    )


def test_a_nightly_batch_job_goes_on_where_the_last_one_ended(scene: Scene) -> None:
    """Batch reads of a topic that grows meanwhile. The first night's run is killed, and run again."""
    scene.create("orders")
    writer = scene.write("orders")

    def nights() -> list[int]:
        files = (scene.folder / "nights").glob("run=*/*.parquet")
        return [json.loads(value)["id"] for file in files for value in pq.read_table(file)["value"].to_pylist()]

    killed = scene.start("nightly_batch.py", "1")
    scene.wait(lambda: (scene.folder / "nights" / "run=1").exists(), "the first night to begin writing", killed)
    killed.stop("kill")
    assert (first := scene.start("nightly_batch.py", "1")).wait() == 0, first.said
    there = len(nights())
    writer.finish()
    assert (second := scene.start("nightly_batch.py", "2")).wait() == 0, second.said
    assert len(nights()) > there > 0
    assert_exactly(nights(), scene.ids("orders"))
