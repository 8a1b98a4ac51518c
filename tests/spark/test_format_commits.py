"""Commits of `format("semel")` that are called again, and processes that die in them, without Spark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from commit_process import PARTITIONS, TOPIC, commit, values_of
from topic_contents import values

import semel
from semel.spark.failpoints import GROUP_VARIABLE, VARIABLE
from semel.testing.apache_kafka import ApacheKafka

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

BATCHES = 3
EMBEDDED = [
    pytest.param(lambda: semel.Broker(), id="embedded, protocol 2"),
    pytest.param(lambda: semel.Broker(config={"transaction.version": 0}), id="embedded, protocol 1"),
]
CALLED_TWICE = [*EMBEDDED, pytest.param(ApacheKafka, id="Apache Kafka", marks=pytest.mark.conformance)]
KILLED = [*EMBEDDED, pytest.param(ApacheKafka, id="Apache Kafka")]


@pytest.fixture
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    with request.param() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=PARTITIONS)
        yield broker.bootstrap


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint as Spark would leave it before the commits of its batches."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    root = tmp_path / "checkpoint"
    (root / "offsets").mkdir(parents=True)
    (root / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))
    for batch in range(BATCHES):
        (root / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"logOffset":{batch}}}')
    return str(root)


def run_process(bootstrap: str, checkpoint: str, run: str, batch: int, *, kill_at: str = "") -> tuple[int, str]:
    """How it ended, and what it said."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    environment["TMPDIR"] = str(Path(checkpoint).parent)
    for name in (VARIABLE, GROUP_VARIABLE):
        environment.pop(name, None)
    if kill_at:
        environment[VARIABLE] = kill_at
    told = json.dumps({"bootstrap": bootstrap, "checkpoint": checkpoint, "run": run, "batch": batch})
    command = [sys.executable, str(here / "commit_process.py"), told]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.returncode, done.stdout.strip()


@pytest.mark.parametrize("bootstrap", CALLED_TWICE, indirect=True)
def test_a_commit_that_is_called_twice_is_written_once(bootstrap: str, checkpoint: str) -> None:
    """E2: again in the same process, in another one of the same run, and in another run after a restart."""
    assert commit(bootstrap, checkpoint, "first run", 0) is False
    assert commit(bootstrap, checkpoint, "first run", 0) is True
    assert run_process(bootstrap, checkpoint, "first run", 0) == (0, "skipped")
    assert run_process(bootstrap, checkpoint, "first run", 1) == (0, "written")
    assert commit(bootstrap, checkpoint, "first run", 1) is True, "what another process has committed since"
    assert run_process(bootstrap, checkpoint, "second run", 1) == (0, "skipped")
    assert values(bootstrap, TOPIC) == sorted(values_of(0) + values_of(1))


@pytest.mark.chaos
@pytest.mark.parametrize("bootstrap", KILLED, indirect=True)
def test_a_process_that_dies_in_its_commit_loses_and_repeats_nothing(bootstrap: str, checkpoint: str) -> None:
    """E2: before EndTxn, between EndTxn and its answer, and after the answer; each time another run goes on."""
    for batch, (kill_at, is_there) in enumerate(
        [("after_offsets", False), ("after_end_sent", None), ("after_end_answered", True)]
    ):
        assert run_process(bootstrap, checkpoint, f"run {batch}", batch, kill_at=kill_at) == (-signal.SIGKILL, "")
        was_there = commit(bootstrap, checkpoint, f"run {batch} again", batch)
        assert is_there in (None, was_there), kill_at
        assert commit(bootstrap, checkpoint, f"run {batch} again", batch) is True
    assert values(bootstrap, TOPIC) == sorted(value for batch in range(BATCHES) for value in values_of(batch))
