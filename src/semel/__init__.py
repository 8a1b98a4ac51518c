"""Exactly-once data pipelines between Kafka, Spark and databases.

The names below are the public face; they are loaded when first used, so that `import semel` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.broker.process import Broker
    from semel.client.admin import Admin
    from semel.client.fetcher import Fetcher
    from semel.client.partitions import TopicPartition
    from semel.client.producer import Outcome, Producer
    from semel.client.shared import SharedTransaction, SharedWriter
    from semel.client.transactions import GroupMember
    from semel.errors import SemelError
    from semel.session.inbox import Inbox
    from semel.session.runner import run
    from semel.session.session import Session
    from semel.spark.batch import write_batch
    from semel.spark.sink import KafkaSink
    from semel.spark.stream import write_stream

__all__ = [
    "Admin",
    "Broker",
    "Fetcher",
    "GroupMember",
    "Inbox",
    "KafkaSink",
    "Outcome",
    "Producer",
    "SemelError",
    "Session",
    "SharedTransaction",
    "SharedWriter",
    "TopicPartition",
    "run",
    "write_batch",
    "write_stream",
]

_LOADED_ON_USE = {
    "Admin": "client.admin",
    "Broker": "broker.process",
    "Fetcher": "client.fetcher",
    "GroupMember": "client.transactions",
    "Inbox": "session.inbox",
    "KafkaSink": "spark.sink",
    "Outcome": "client.producer",
    "Producer": "client.producer",
    "SemelError": "errors",
    "Session": "session.session",
    "SharedTransaction": "client.shared",
    "SharedWriter": "client.shared",
    "TopicPartition": "client.partitions",
    "run": "session.runner",
    "write_batch": "spark.batch",
    "write_stream": "spark.stream",
}


def __getattr__(name: str) -> object:
    module = _LOADED_ON_USE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
