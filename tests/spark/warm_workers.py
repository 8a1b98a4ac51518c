"""Spark's daemon for Python workers, with everything imported that they need before it forks them.

A driver that lives for seconds would spend most of them on the same imports, once for each worker.
"""

from __future__ import annotations

import pandas as _pandas
import pyspark.worker as _worker
from pyspark import daemon

from semel.bridges import spark_staging as _staging
from semel.spark import encode as _encode
from semel.spark import write as _write

LOADED = (_pandas, _worker, _encode, _staging, _write)

if __name__ == "__main__":
    daemon.manager()
