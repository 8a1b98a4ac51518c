"""Checkpoints of the Spark source as Spark's own Kafka source reads them, by its own code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pyspark
import pytest

from semel.client.partitions import TopicPartition
from semel.spark.source_offsets import Note, to_checkpoint
from semel.testing.maven import jars, java_command

_VERSION = "4.0.0"
_PROGRAM = """
public class Probe {
    public static void main(String[] arguments) {
        System.out.println(org.apache.spark.sql.kafka010.JsonUtils.partitionOffsets(arguments[0]));
    }
}
"""


@pytest.mark.conformance
def test_sparks_kafka_source_reads_the_same_offsets_and_passes_over_the_note(tmp_path: Path) -> None:
    """So a query can move from Semel to Spark's connector with its checkpoint."""
    connector = jars(
        f"spark-kafka/{_VERSION}",
        (
            f"org.apache.spark:spark-sql-kafka-0-10_2.13:{_VERSION}",
            f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{_VERSION}",
            "org.apache.kafka:kafka-clients:3.9.0",
            "org.apache.commons:commons-pool2:2.12.0",
        ),
        alone=True,
    )
    orders = TopicPartition("orders", 0)
    text = json.dumps(to_checkpoint({orders: 5}, Note("cluster", {orders: 3}, {"orders": "id"})))
    program = tmp_path / "Probe.java"
    program.write_text(_PROGRAM)
    classes = f"{connector}/*:{Path(pyspark.__file__).parent}/jars/*"
    command = [java_command(), "-cp", classes, str(program), text]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Map(orders-0 -> 5)"
