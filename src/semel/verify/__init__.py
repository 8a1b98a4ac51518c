"""Proof: workloads and users' own programs under faults, judged; and a seeded simulation of the broker.

`TopicRecord` and `Finding` are what a user's own rule works with: see `semel.verify.programs.records`.
"""

from semel.verify.programs.records import Finding, TopicRecord

__all__ = ["Finding", "TopicRecord"]
