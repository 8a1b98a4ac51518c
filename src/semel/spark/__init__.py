"""Spark: a source without jars and an exactly-once sink. Nothing outside of this package imports pyspark."""
