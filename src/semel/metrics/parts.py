"""What is counted of sink, session, relay, mirror and `semel.both`: the same metrics for each, named after it.

The names begin with `semel_`, then the part: `semel_sink_transactions_total`. The broker's begin with `semel_broker_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from semel.metrics.registry import Registry

PREFIX: Final = "semel_"
_BY: Final = ("pipeline",)


class Part:
    """The metrics of one part."""

    def __init__(self, registry: Registry, name: str, records: str) -> None:
        self.name = name
        outcomes = "Transactions that ended, by outcome: committed, aborted, unknown, skipped (before), pending (both)."
        self.transactions = registry.counter(f"{name}_transactions", outcomes, (*_BY, "outcome"))
        self.records = registry.counter(f"{name}_records", records, _BY)
        self.dead_letters = registry.counter(
            f"{name}_dead_letters", "Records that could not be handled and were put aside, committed.", _BY
        )
        self.failures = registry.counter(
            f"{name}_failures", "Errors that ended a run of the pipeline, by their class.", (*_BY, "error")
        )
        self.seconds = registry.histogram(
            f"{name}_transaction_seconds", "Committed transactions, by how long they were open.", _BY
        )
        self.last_commit = registry.gauge(
            f"{name}_last_commit_timestamp_seconds", "When the last transaction was committed.", _BY
        )
        self.last_turn = registry.gauge(
            f"{name}_last_turn_timestamp_seconds", "When the pipeline last looked for work or ended some.", _BY
        )

    def committed(
        self, pipeline: str, records: int, seconds: float, dead_letters: int = 0, now: Callable[[], float] = time.time
    ) -> None:
        self.transactions.add(pipeline, "committed")
        self.records.add(pipeline, amount=records)
        self.dead_letters.add(pipeline, amount=dead_letters)
        self.seconds.observe(pipeline, value=seconds)
        self.last_commit.set(pipeline, value=now())
        self.last_turn.set(pipeline, value=now())

    def ended(self, pipeline: str, outcome: str) -> None:
        """A transaction that was not committed, or was committed before."""
        self.transactions.add(pipeline, outcome)
        self.last_turn.set(pipeline, value=time.time())

    def looked(self, pipeline: str) -> None:
        """It has asked for work, whether or not there was any."""
        self.last_turn.set(pipeline, value=time.time())

    def failed(self, pipeline: str, error: BaseException) -> None:
        self.failures.add(pipeline, type(error).__name__)


REGISTRY: Final = Registry()
SINK: Final = Part(REGISTRY, "sink", "Rows that were written and committed, dead letters among them.")
SINK_BYTES: Final = REGISTRY.counter("sink_bytes", "Bytes of committed rows, as they were sent.", _BY)
SINK_PREPARING: Final = REGISTRY.histogram(
    "sink_preparing_seconds", "Computing and encoding or staging, before a transaction is opened.", _BY
)
SINK_BATCH: Final = REGISTRY.gauge("sink_batch_id", "The last micro-batch that was committed or skipped.", _BY)
SESSION: Final = Part(REGISTRY, "session", "Records that were consumed and committed, dead letters among them.")
RELAY: Final = Part(REGISTRY, "relay", "Rows that were relayed and committed, dead letters among them.")
RELAY_RETRIES: Final = REGISTRY.counter(
    "relay_retries", "Times that the relay had to try again, by what failed: database or kafka.", (*_BY, "of")
)
MIRROR: Final = Part(REGISTRY, "mirror", "Records that were mirrored and committed at the target.")
MIRROR_RETRIES: Final = REGISTRY.counter("mirror_retries", "Times that the mirror had to try again.", _BY)
MIRROR_LAG: Final = REGISTRY.gauge(
    "mirror_lag_offsets", "From what is committed at the target to the end of the source, markers included.", _BY
)
MIRROR_WAITING: Final = REGISTRY.gauge(
    "mirror_waiting_seconds", "How long the mirror has waited for the oldest open transaction of the source.", _BY
)
MIRROR_GROUPS_BEHIND: Final = REGISTRY.gauge(
    "mirror_groups_behind", "Positions of groups that are ahead of the mirror, so they are not carried yet.", _BY
)
MIRROR_LOST: Final = REGISTRY.counter(
    "mirror_lost_offsets", "Offsets that were deleted at the source before they were mirrored.", _BY
)
BOTH: Final = Part(REGISTRY, "both", "Records of blocks that were committed in the database and in Kafka.")
BOTH_RESENT: Final = REGISTRY.counter(
    "both_resent", "Times that Kafka had aborted what the database had committed, and it was sent again.", _BY
)
