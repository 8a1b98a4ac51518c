"""Lets Spark find `format("semel")` by itself: it looks for a `DefaultSource` in modules named `pyspark_*`."""

from semel.spark.source import SemelSource as DefaultSource

__all__ = ["DefaultSource"]
