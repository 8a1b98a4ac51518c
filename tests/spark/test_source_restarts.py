"""A query with default options on a topic that is written to all the time, restarted again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from steady_feed import PARTITIONS, Seen, check_seen, feeding

import semel
from semel.spark.source_offsets import split_note

RATE = 5_000
RESTARTS = 10

ENDS = ("kill", "stop", "forget", "kill and forget")
"""How a life of the query ends; to forget is to remove Spark's newest commit, as if it had been killed before it."""


@pytest.mark.chaos
def test_ten_restarts_of_a_default_start_on_a_busy_topic_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Every start succeeds, nothing before the first one is read, and what came after it is read once."""
    topic = "busy"
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(topic, partitions=PARTITIONS)
        with feeding(broker.bootstrap, topic, RATE):
            live(broker.bootstrap, topic, tmp_path, "kill", batches=1)
            forget_all_but_the_first_batch(tmp_path)
            for number in range(RESTARTS):
                live(broker.bootstrap, topic, tmp_path, ENDS[number % len(ENDS)], batches=2)
        first = json.loads((tmp_path / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
        _, note = split_note(first)
        assert note is not None
        start = {named.partition: offset for named, offset in note.start.items()}
        assert min(start.values()) > 0, "there was something before the start"
        assert check_seen(read_seen(tmp_path), broker.bootstrap, topic, start) > RATE


def read_seen(folder: Path) -> list[tuple[int, Seen]]:
    """Without the last line of a life that was killed while it wrote it."""
    path = folder / "seen"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [tuple(json.loads(line)) for line in lines]


def forget_all_but_the_first_batch(folder: Path) -> None:
    """As if the query had been killed at the end of its first batch, before Spark noted that it was done."""
    for log, first in (("commits", 0), ("offsets", 1)):
        for path in (folder / "checkpoint" / log).iterdir():
            if path.name.isdigit() and int(path.name) >= first:
                remove(path)
    lines = [json.dumps(seen) for seen in read_seen(folder) if seen[0] == 0]
    (folder / "seen").write_text("".join(f"{line}\n" for line in lines))


def remove(path: Path) -> None:
    path.unlink()
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def live(bootstrap: str, topic: str, folder: Path, end: str, *, batches: int) -> None:
    """Start the query, wait until it has gone through some micro-batches with records, and end it."""
    began = len(read_seen(folder))
    command = [sys.executable, str(Path(__file__).parent / "restart_driver.py"), bootstrap, topic, str(folder)]
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    assert driver.stdin is not None
    try:
        deadline = time.monotonic() + 120
        while sum(bool(seen) for _, seen in read_seen(folder)[began:]) < batches:
            assert driver.poll() is None, f"the query has ended: {(folder / 'log').read_text()[-4000:]}"
            assert time.monotonic() < deadline, "the query makes no progress"
            time.sleep(0.05)
        if end in ("stop", "forget"):
            driver.stdin.close()
            assert driver.wait(60) == 0, (folder / "log").read_text()[-4000:]
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
        driver.stdin.close()
    if "forget" in end:
        commits = folder / "checkpoint" / "commits"
        remove(max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)))
