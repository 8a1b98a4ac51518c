"""Kafka's client libraries behind one small face, for the workloads of a verification."""
