"""The project in examples/declarative_pipeline, run by Spark's own command, and killed on its way."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pyspark
import pytest
from driver_groups import run_group
from topic_contents import values

import semel
from semel.spark.failpoints import POINTS

pytestmark = pytest.mark.chaos

PROJECT = Path(__file__).parents[2] / "examples" / "declarative_pipeline"
KILLS = int(os.environ.get("SEMEL_PIPELINE_KILLS", "2"))
STEPS = [POINTS[number * 3 % len(POINTS)] for number in range(1, KILLS + 1)]
"""Three and ten have no common factor: ten kills have every step once."""
PER_RUN = 150


def test_two_flows_into_two_sinks_are_exact_though_every_run_is_killed(tmp_path: Path) -> None:
    """E1: each flow has a checkpoint that Spark chose, and each sink a transaction of its own."""
    project = tmp_path / "project"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
    spec = project / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///tmp/orders-by-size", f"file://{tmp_path}/storage"))
    log = tmp_path / "log"
    sent: list[bytes] = []
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("orders", "long", "short", partitions=2)
        for step in [*STEPS, None]:
            sent += send(broker.bootstrap, len(sent))
            ended = run(spec, broker.bootstrap, log, kill_at=step)
            assert ended == (0 if step is None else -signal.SIGKILL), (step, log.read_text()[-3000:])
        assert values(broker.bootstrap, "long") == sorted(value for value in sent if len(value) > 3)
        assert values(broker.bootstrap, "short") == sorted(value for value in sent if len(value) <= 3)


def send(bootstrap: str, first: int) -> list[bytes]:
    sent = [b"%d" % number for number in range(900 + first, 900 + first + PER_RUN)]
    with semel.Producer(bootstrap_servers=bootstrap) as producer:
        for value in sent:
            producer.send("orders", value)
    return sent


def run(spec: Path, bootstrap: str, log: Path, *, kill_at: str | None) -> int:
    told = {
        "BROKERS": bootstrap,
        "SPARK_HOME": str(pyspark.__path__[0]),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    command = ["spark-pipelines", "run", "--spec", str(spec), "--conf", "spark.ui.enabled=false"]
    return run_group(command, told, log, kill_at=kill_at)
