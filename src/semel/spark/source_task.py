"""What a task of the Spark source is told, and what becomes of records that are gone. Loads nothing that reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from semel.client.partitions import TopicPartition
from semel.errors import KafkaError

_LOG: Final = logging.getLogger("semel.spark")


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Everything that a task needs, wherever it runs."""

    settings: Mapping[str, str] = field(repr=False)
    """Kafka's own settings; may hold a password."""
    columns: tuple[str, ...]
    fail_on_data_loss: bool = True


def report_loss(fail: bool, kind: type[KafkaError], partition: TopicPartition, gone: str) -> None:
    """Raise, or only warn where the user has accepted losses."""
    from semel.client.leader_calls import describe

    if not fail:
        _LOG.warning("Records of %s are gone and passed over, %s.", describe(partition), gone)
        return
    raise kind(
        f"Records of {describe(partition)} are gone before they were read, {gone}. To go on without them, write "
        "failOnDataLoss=false; to keep them longer next time, raise retention.ms and retention.bytes of the topic."
    )
