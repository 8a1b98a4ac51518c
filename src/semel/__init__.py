"""Exactly-once data pipelines between Kafka, Spark and databases."""
