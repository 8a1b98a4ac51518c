"""Spark to Kafka exactly once: one transaction for each micro-batch or job, written by the whole cluster."""
