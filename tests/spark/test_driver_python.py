"""Jobs started by the path of their interpreter, as in `venv/bin/python job.py`, with another `python3` on the PATH."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import semel
from semel.spark.driver_python import is_local

JOB = """
import sys
{imports}
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    .getOrCreate()
)
orders = spark.read.format("semel").option("kafka.bootstrap.servers", sys.argv[1]).option("subscribe", "orders").load()
print("read", [bytes(row.value) for row in orders.select("value").collect()])
semel.write_batch(orders.select("value"), name="copy", job_id="1", bootstrap=sys.argv[1], topic="copies")
copies = spark.read.format("semel").option("kafka.bootstrap.servers", sys.argv[1]).option("subscribe", "copies").load()
print("copied", copies.count())
"""
SEMEL_FIRST = "import semel\nfrom pyspark.sql import SparkSession"
PYSPARK_FIRST = "from pyspark.sql import SparkSession\nimport semel"


@pytest.mark.parametrize("imports", [SEMEL_FIRST, pytest.param(PYSPARK_FIRST, marks=pytest.mark.large)])
def test_a_job_of_an_environment_that_is_not_activated_reads_and_writes(imports: str, tmp_path: Path) -> None:
    """The first `python3` on the PATH knows neither Semel nor pyspark; a new user has set no variable."""
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    environment["PATH"] = f"{tmp_path / 'other' / 'bin'}{os.pathsep}{environment['PATH']}"
    job = tmp_path / "job.py"
    job.write_text(JOB.format(imports=imports))
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("orders", "copies")
        with semel.Producer({"bootstrap.servers": broker.bootstrap}) as producer:
            producer.send("orders", b"first")
        command = [sys.executable, str(job), broker.bootstrap]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "read [b'first']" in done.stdout
    assert "copied 1" in done.stdout


@pytest.mark.parametrize(
    ("master", "environment", "expected"),
    [
        ("local-cluster[2,1,1024]", {}, True),
        ("yarn", {}, False),
        ("k8s://host", {"PYSPARK_SUBMIT_ARGS": "--master local pyspark-shell"}, False),
        (None, {"PYSPARK_SUBMIT_ARGS": "--master spark://host:7077 pyspark-shell"}, False),
        (None, {"PYSPARK_SUBMIT_ARGS": "--conf spark.master=local[4] pyspark-shell"}, True),
        (None, {"MASTER": "spark://host:7077"}, False),
        (None, {"SPARK_CONF_DIR": "with master"}, False),
        (None, {"SPARK_HOME": "without"}, True),
        ("local", {"SPARK_CONF_DIR": "with master"}, True),
    ],
)
def test_only_a_local_spark_gets_the_drivers_interpreter(
    master: str | None, environment: dict[str, str], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors of a cluster may not have the driver's path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "with master").mkdir()
    (tmp_path / "with master" / "spark-defaults.conf").write_text("# ours\nspark.master   spark://host:7077\n")
    assert is_local(master, environment) is expected


_FAKE = """
import os, sys, types

class SparkContext:
    def __init__(self, master=None, appName=None, sparkHome=None, pyFiles=None, environment=None, batchSize=0,
                 serializer=None, conf=None):
        self.python = os.environ.get("PYSPARK_PYTHON")
"""
_ASK = """
import os, sys
import semel
from pyspark.context import SparkContext
assert SparkContext("local").python == sys.executable, "chosen"
del os.environ["PYSPARK_PYTHON"]
assert SparkContext("spark://host:7077").python is None, "left alone"
assert SparkContext(conf={"spark.master": "yarn"}).python is None
assert SparkContext(None, "app", None, None, None, 0, None, {"spark.master": "yarn"}).python is None
assert SparkContext(conf={"spark.master": "local[2]"}).python == sys.executable
os.environ["PYSPARK_PYTHON"] = "python3.11"
assert SparkContext("local").python == "python3.11", "the user's choice counts"
del os.environ["PYSPARK_PYTHON"]
os.environ["PYSPARK_GATEWAY_PORT"] = "1"
assert SparkContext("local").python is None, "spark-submit has started Java already"
"""


def test_the_users_own_choice_and_clusters_are_left_alone(tmp_path: Path) -> None:
    """With a stand-in for pyspark's class, since a real one would need a cluster for every case."""
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").touch()
    (tmp_path / "pyspark" / "context.py").write_text(_FAKE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", _ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
