"""Partitions on disk: segment files of record batches, their indexes, snapshots of producer state, and recovery."""
