"""What Spark's Python workers do between two tasks, made cheap: a fifth of a second for each task otherwise.

A worker that is used again collects garbage after each task, through all modules that are loaded, and before the next
one it lets all importers read their folders anew, Spark's own archives too, with thousands of entries. Micro-batches
are short, so both were most of what Python took.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from typing import Final
from zipimport import zipimporter

_SPARK_ARCHIVE: Final = re.compile(r"(^|/)((pyspark|py4j-[\d.]+-src)\.zip|spark-core_[^/]+\.jar)$")
_frozen_in: set[int] = set()


def ease_worker() -> None:
    """To be called at the end of a task. Harmless when repeated, and in any process."""
    for path, finder in list(sys.path_importer_cache.items()):
        # There is one for each package in an archive. Where an import asks for it, it is made again from the table of
        # contents that Python has kept.
        if isinstance(finder, zipimporter) and _SPARK_ARCHIVE.search(finder.archive):
            sys.path_importer_cache.pop(path, None)
    if os.getpid() not in _frozen_in:
        _frozen_in.add(os.getpid())
        gc.collect()  # what is garbage now would never be freed
        gc.freeze()
