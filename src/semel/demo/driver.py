"""The Spark driver of the demo, which is killed: `python -m semel.demo.driver <JSON>` runs both pipelines.

It prints a line of JSON for everything that happens. `finish` on its standard input makes it work off what there is and
end; so does the end of that input, at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from semel.demo.pipeline_names import PIPELINES
from semel.demo.pipelines import START
from semel.demo.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S: Final = 1
_PAUSE_S: Final = 0.5
_ONE_AT_A_TIME: Final = threading.Lock()
"""Two queries that start together would have Spark start twice as many Python processes."""
_SETTINGS: Final = {
    # The processes live for seconds: the second compiler, parallel collectors and generated code would only cost.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
}


def main() -> None:
    told = json.loads(sys.argv[1])
    finish = threading.Event()
    threading.Thread(target=_listen, args=(finish,), daemon=True).start()
    spark = make_spark()
    tell("ready")
    tables, bootstrap, folder = Tables(**told["tables"]), told["bootstrap"], Path(told["folder"])

    def start(name: str) -> StreamingQuery:
        return START[name](spark, tables, bootstrap, str(folder / name), _tell_batch)

    runs = [threading.Thread(target=_keep_running, args=(name, partial(start, name), finish)) for name in PIPELINES]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    tell("finished")


def make_spark() -> SparkSession:
    """Two tasks at a time on this machine; one that fails is tried again, as on a cluster."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = SparkSession.builder.master("local[2,4]").appName("semel demo")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def tell(event: str, **fields: Any) -> None:
    """One write, so that lines of two threads cannot mix."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def _listen(finish: threading.Event) -> None:
    if sys.stdin.readline():
        finish.set()
    else:
        os._exit(1)


def _tell_batch(pipeline: str, number: int | None, records: int) -> None:
    tell("batch", pipeline=pipeline, number=number, records=records)


def _keep_running(name: str, start: Callable[[], StreamingQuery], finish: threading.Event) -> None:
    """Start a query again whenever it fails, as any supervisor of jobs would, until all of its input is done."""
    while True:
        try:
            with _ONE_AT_A_TIME:
                query = start()
            while not finish.is_set():
                if query.awaitTermination(_LOOK_S):
                    break
            query.processAllAvailable()
            query.stop()
        except Exception as error:  # any of Spark's and Semel's: a job that failed is started again
            first = str(error).strip().splitlines()[:1]
            tell("failed", pipeline=name, kind=type(error).__name__, error="".join(first))
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    main()
