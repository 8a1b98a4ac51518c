"""Exactly-once data pipelines between Kafka, Spark and databases.

The names below are the public face; they are loaded when first used, so that `import semel` costs nothing.
"""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from semel.spark.driver_python import choose_when_spark_starts as _choose_when_spark_starts

if TYPE_CHECKING:
    from semel import advise as advise
    from semel import logs as logs
    from semel import metrics as metrics
    from semel import traces as traces
    from semel.bridges import effects as effects
    from semel.bridges.both.both import both, recover_both
    from semel.bridges.both.table_sql import both_table_sql
    from semel.bridges.capture.capture import capture
    from semel.bridges.change_applier import apply_changes
    from semel.bridges.effects import Effects
    from semel.bridges.inbox import Inbox
    from semel.bridges.mirror.groups import is_group_mirrored
    from semel.bridges.mirror.mirror import mirror
    from semel.bridges.read_your_writes import ReadYourWrites, wait_until_written
    from semel.bridges.relay.outbox import Outbox
    from semel.bridges.relay.relay import relay
    from semel.bridges.relay.table_sql import outbox_table_sql
    from semel.bridges.source_inbox import SourceInbox
    from semel.bridges.spark_sink import DatabaseSink
    from semel.bridges.targets import Kafka, Postgres, SQLite
    from semel.broker.process import Broker
    from semel.client.admin import Admin
    from semel.client.fetcher import Fetcher
    from semel.client.partitions import TopicPartition
    from semel.client.producer import Outcome, Producer
    from semel.client.shared import SharedTransaction, SharedWriter
    from semel.client.transactions import GroupMember
    from semel.errors import (
        AuthenticationFailed,
        BrokerUnreachable,
        CommitPending,
        CommitUnknown,
        ConfigError,
        ConnectionLost,
        CorruptRecords,
        DatabaseError,
        DatabaseUnreachable,
        Fenced,
        InboxOvertaken,
        InvalidState,
        KafkaError,
        NotAuthorized,
        OffsetOutOfRange,
        RecordFailed,
        RecordTooLarge,
        RequestTimedOut,
        SemelError,
        TooManyDeadLetters,
        TopicRecreated,
        TransactionAborted,
        TransactionIncomplete,
        UnknownTopic,
        UnsupportedByBroker,
        ValueDoesNotFit,
        WireError,
        WorkTooLong,
    )
    from semel.session.runner import run
    from semel.session.session import Session
    from semel.session.source_session import SourceSession
    from semel.session.transaction import Row
    from semel.spark.batch import write_batch
    from semel.spark.committed import committed_offsets
    from semel.spark.lag import LagRefused
    from semel.spark.once import WriteFailed
    from semel.spark.owner import PipelineFenced
    from semel.spark.sink import KafkaSink
    from semel.spark.spool import SpoolFailed
    from semel.spark.stream import write_stream
    from semel.spark.write import BlobsChanged

__version__ = "0.1.0"

__all__ = [
    "Admin",
    "AuthenticationFailed",
    "BlobsChanged",
    "Broker",
    "BrokerUnreachable",
    "CommitPending",
    "CommitUnknown",
    "ConfigError",
    "ConnectionLost",
    "CorruptRecords",
    "DatabaseError",
    "DatabaseSink",
    "DatabaseUnreachable",
    "Effects",
    "Fenced",
    "Fetcher",
    "GroupMember",
    "Inbox",
    "InboxOvertaken",
    "InvalidState",
    "Kafka",
    "KafkaError",
    "KafkaSink",
    "LagRefused",
    "NotAuthorized",
    "OffsetOutOfRange",
    "Outbox",
    "Outcome",
    "PipelineFenced",
    "Postgres",
    "Producer",
    "ReadYourWrites",
    "RecordFailed",
    "RecordTooLarge",
    "RequestTimedOut",
    "Row",
    "SQLite",
    "SemelError",
    "Session",
    "SharedTransaction",
    "SharedWriter",
    "SourceInbox",
    "SourceSession",
    "SpoolFailed",
    "TooManyDeadLetters",
    "TopicPartition",
    "TopicRecreated",
    "TransactionAborted",
    "TransactionIncomplete",
    "UnknownTopic",
    "UnsupportedByBroker",
    "ValueDoesNotFit",
    "WireError",
    "WorkTooLong",
    "WriteFailed",
    "apply_changes",
    "both",
    "both_table_sql",
    "capture",
    "committed_offsets",
    "is_group_mirrored",
    "mirror",
    "outbox_table_sql",
    "recover_both",
    "relay",
    "run",
    "wait_until_written",
    "write_batch",
    "write_stream",
]

# All others are exceptions of semel.errors.
_LOADED_ON_USE = {
    "Admin": "client.admin",
    "BlobsChanged": "spark.write",
    "Broker": "broker.process",
    "DatabaseSink": "bridges.spark_sink",
    "Effects": "bridges.effects",
    "Fetcher": "client.fetcher",
    "GroupMember": "client.transactions",
    "Inbox": "bridges.inbox",
    "Kafka": "bridges.targets",
    "KafkaSink": "spark.sink",
    "LagRefused": "spark.lag",
    "Outbox": "bridges.relay.outbox",
    "Outcome": "client.producer",
    "PipelineFenced": "spark.owner",
    "Postgres": "bridges.targets",
    "Producer": "client.producer",
    "ReadYourWrites": "bridges.read_your_writes",
    "Row": "session.transaction",
    "SQLite": "bridges.targets",
    "Session": "session.session",
    "SharedTransaction": "client.shared",
    "SharedWriter": "client.shared",
    "SourceInbox": "bridges.source_inbox",
    "SourceSession": "session.source_session",
    "SpoolFailed": "spark.spool",
    "TopicPartition": "client.partitions",
    "WriteFailed": "spark.once",
    "advise": "advise",  # the module itself
    "both": "bridges.both.both",
    "both_table_sql": "bridges.both.table_sql",
    "apply_changes": "bridges.change_applier",
    "capture": "bridges.capture.capture",
    "committed_offsets": "spark.committed",
    "effects": "bridges.effects",  # the module itself
    "is_group_mirrored": "bridges.mirror.groups",
    "mirror": "bridges.mirror.mirror",
    "logs": "logs",  # the module itself
    "metrics": "metrics",  # the module itself
    "outbox_table_sql": "bridges.relay.table_sql",
    "recover_both": "bridges.both.both",
    "relay": "bridges.relay.relay",
    "run": "session.runner",
    "traces": "traces",  # the module itself
    "wait_until_written": "bridges.read_your_writes",
    "write_batch": "spark.batch",
    "write_stream": "spark.stream",
}

_MODULES = ("advise", "effects", "logs", "metrics", "traces")


def __getattr__(name: str) -> object:
    module = _LOADED_ON_USE.get(name, "errors" if name in __all__ else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = _import_module(f"{__name__}.{module}")
    value = found if module == name else getattr(found, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


_choose_when_spark_starts()
if _os.environ.get("SEMEL_LOG"):
    _import_module("semel.logs").set_up_if_asked()
