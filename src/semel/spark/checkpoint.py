"""Files in a query's checkpoint, wherever it is: Spark's own logs, and a note of the ledger that has its batches.

The note says where a missing entry means that nothing was written. Without it a changed `ledger=`, or a ledger topic
that was deleted, would look like a new query.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from semel.client.admin import Admin
from semel.client.cluster import Cluster

NOTE: Final = "semel-ledger.json"


class CheckpointFiles(Protocol):
    """Small files on any file system that Spark can use."""

    def read(self, path: str) -> str | None:
        """The text of a file, or None if it is not there."""
        ...

    def write(self, path: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class HadoopFiles:
    """In the driver, without a job."""

    spark: Any

    def read(self, path: str) -> str | None:
        named, files = self._locate(path)
        if not files.exists(named):
            return None
        stream = files.open(named)
        try:
            return java_class(self.spark, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8")
        finally:
            stream.close()

    def write(self, path: str, text: str) -> None:
        named, files = self._locate(path)
        stream = files.create(named, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def _locate(self, path: str) -> tuple[Any, Any]:
        named = java_class(self.spark, "org.apache.hadoop.fs.Path")(path)
        return named, named.getFileSystem(self.spark.sparkContext._jsc.hadoopConfiguration())


@dataclass(frozen=True, slots=True)
class ConnectFiles:
    """Through Spark Connect, where only jobs can read and write."""

    spark: Any

    def read(self, path: str) -> str | None:
        from pyspark.errors import AnalysisException

        try:
            found = self.spark.read.text(path, wholetext=True).collect()
        except AnalysisException as error:
            if "PATH_NOT_FOUND" in str(error):
                return None
            raise
        return found[0].value if found else None

    def write(self, path: str, text: str) -> None:
        self.spark.createDataFrame([(text,)], "value string").coalesce(1).write.mode("overwrite").text(path)


def java_class(spark: Any, name: str) -> Any:
    """Asked for by its whole name: attribute by attribute, Java would look for a class `org` in every jar, then for
    `org.apache`, and so on, which took 9 ms of each micro-batch."""
    return getattr(spark.sparkContext._jvm, name)


@dataclass(frozen=True, slots=True)
class Home:
    """The ledger that has the batches of a checkpoint."""

    cluster: str
    """The id of the Kafka cluster, or of the ledger in a database."""
    ledger: str
    topic_id: str | None
    """Tells a topic that was deleted and created again; brokers before 2.8 have none."""
    pipeline: str = ""
    """The name under which the query ran last. A run under another name stops that one."""

    @classmethod
    def of(cls, cluster: Cluster, ledger: str) -> Home:
        shape = cluster.topic_shapes([ledger]).get(ledger)
        topic_id = None if shape is None or shape.topic_id is None else str(shape.topic_id)
        return cls(Admin(cluster).describe_cluster().cluster_id, ledger, topic_id)

    def is_same(self, other: Home) -> bool:
        is_topic_same = self.topic_id == other.topic_id or None in (self.topic_id, other.topic_id)
        return (self.cluster, self.ledger) == (other.cluster, other.ledger) and is_topic_same

    def write(self, files: CheckpointFiles, root: str, note: str = NOTE) -> None:
        files.write(f"{root}/{note}", json.dumps(asdict(self)))


def read_home(files: CheckpointFiles, root: str, note: str = NOTE) -> Home | None:
    """What the sink has noted in a checkpoint; None where it has not, or died while it did."""
    text = files.read(f"{root}/{note}")
    try:
        return None if text is None else Home(**json.loads(text))
    except (ValueError, TypeError):
        return None
