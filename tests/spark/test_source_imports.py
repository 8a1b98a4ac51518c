"""What the Spark source loads in the processes that plan: a streaming query starts one of its own and waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import semel

_HEAVY = ["numpy", "pandas", "pyarrow", "scramp", "asn1crypto", "typer", "rich", "prometheus_client"]
_LOADED = "import json, sys; print(json.dumps([name for name in sys.modules if sys.modules[name]]))"
_PLAN = """
import sys
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable
from semel.spark.source import SemelSource

options = {"kafka.bootstrap.servers": sys.argv[1], "subscribe": "orders", "startingOffsets": "earliest"}
source = SemelSource(CaseInsensitiveDict(options))
reader = source.streamReader(source.schema())
reader.prepareForTriggerAvailableNow()
start = reader.initialOffset()
end = reader.latestOffset(start, ReadAllAvailable())
assert [task.value.end for task in reader.partitions(start, end)] == [1], end
reader.stop()
"""


def _loaded_after(code: str, *arguments: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\n{_LOADED}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return set(names)


def test_looking_the_source_up_loads_nothing_of_the_client() -> None:
    """Spark does that in every session that uses any Python data source."""
    loaded = _loaded_after("import pyspark_semel")
    assert loaded.isdisjoint(_HEAVY)
    semels = {name for name in loaded if name.startswith("semel.")}
    assert semels == {
        "semel.errors",
        "semel.spark",
        "semel.spark.driver_python",
        "semel.spark.source",
        "semel.spark.source_needs",
        "semel.spark.workers",
    }


def test_planning_a_stream_loads_nothing_that_reads_records_and_one_version_of_each_message() -> None:
    """Nobody but the tasks needs NumPy, Arrow or the fetcher; and each version of a message takes milliseconds."""
    with semel.Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("orders")
        with semel.Producer({"bootstrap.servers": broker.bootstrap}) as producer:
            producer.send("orders", b"1")
        loaded = _loaded_after(_PLAN, broker.bootstrap)
    assert loaded.isdisjoint(_HEAVY)
    for unwanted in ("records", "broker", "bench", "client.fetcher", "client.producer", "spark.source_read"):
        assert f"semel.{unwanted}" not in loaded
    for api in ("api_versions", "list_offsets", "metadata"):
        prefix = f"kio.schema.{api}.v"
        versions = {name.removeprefix(prefix).partition(".")[0] for name in loaded if name.startswith(prefix)}
        assert len(versions) == 1, (api, versions)
