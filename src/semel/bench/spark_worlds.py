"""Two Sparks to measure side by side: the version that is installed here, and the one that has a Kafka connector.

Spark's connector is a jar for one version of Spark. Each version gets an environment of its own, made on first use from
PyPI and Maven coordinates and kept in the cache; Semel's own code there is this very one.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import semel
from semel.bench.spark_jobs import ANSWER, ERROR
from semel.errors import SemelError
from semel.testing.maven import jars
from semel.testing.pyspark_environments import pyspark_python

CONNECTOR_VERSION: Final = "4.0.0"
"""The pyspark of the baseline, which its connector must match."""
_CONNECTOR: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    "org.apache.kafka:kafka-clients:3.9.0",
    "org.apache.commons:commons-pool2:2.12.0",
)


class JobFailed(SemelError):
    """A query of the bench did not end well."""


class SparkProcess:
    """A process with a Spark session that runs one job after the other."""

    def __init__(self, python: str, environment: Mapping[str, str], jars: str = "") -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, "-m", "semel.bench.spark_jobs", jars],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_compiled(os.environ), **environment},
        )

    def run(self, job: str, **arguments: Any) -> dict[str, Any]:
        """Run a job of `Jobs` and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                if ERROR in answer:
                    raise JobFailed(f"The job {job} of `semel bench spark` failed: {answer[ERROR]}")
                return answer
        self._errors.seek(0)
        tail = "\n".join(self._errors.read().strip().splitlines()[-20:])
        raise JobFailed(f"The job {job} of `semel bench spark` failed; nothing was measured.\n{tail}")

    def close(self) -> None:
        """End the process and its Spark."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended by itself, with a question unread
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


@contextmanager
def installed_spark() -> Iterator[SparkProcess]:
    """The version of pyspark that is beside Semel, as a user has it: without any jar, and without a developer's tools,
    some of which cost every new process time."""
    with _environment(version("pyspark"), ("semel", "pyspark_semel.py")) as spark:
        yield spark


@contextmanager
def connector_spark() -> Iterator[SparkProcess]:
    """The pyspark that Spark's Kafka connector is there for, with the connector, and with Semel."""
    libraries = jars(f"spark-kafka/{CONNECTOR_VERSION}", _CONNECTOR, alone=True)
    with _environment(CONNECTOR_VERSION, ("semel",), str(libraries)) as spark:
        yield spark


@contextmanager
def _environment(pyspark: str, ours: Sequence[str], jars: str = "") -> Iterator[SparkProcess]:
    """A process with this version of pyspark, for which `ours` are installed and nothing else that lies beside them."""
    python = pyspark_python(pyspark)
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        for name in ours:
            (Path(folder) / name).symlink_to(Path(semel.__file__).parents[1] / name)
        with _running(SparkProcess(str(python), {"PYTHONPATH": folder}, jars)) as spark:
            yield spark


@contextmanager
def _running(spark: SparkProcess) -> Iterator[SparkProcess]:
    try:
        yield spark
    finally:
        spark.close()


def _compiled(environment: Mapping[str, str]) -> dict[str, str]:
    """Installed packages are compiled, and Python keeps what it has compiled. Where a developer has told it not to,
    each process that Spark starts would compile Semel anew, and the bench would measure that."""
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
