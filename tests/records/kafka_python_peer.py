"""kafka-python's codec and hash, whose import uses a call that Python 3.11 deprecates (warnings are errors here)."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import codec
    from kafka.partitioner.default import murmur2
    from kafka.record.default_records import DefaultRecordBatchBuilder
    from kafka.record.memory_records import MemoryRecords

__all__ = ["DefaultRecordBatchBuilder", "MemoryRecords", "codec", "murmur2"]
