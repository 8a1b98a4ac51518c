"""Workloads of a verification: what is asked of a pipeline, and the processes that ask it."""
