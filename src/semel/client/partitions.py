"""The name of a partition."""

from __future__ import annotations

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """
    >>> TopicPartition("orders", 3)
    TopicPartition(topic='orders', partition=3)
    """

    topic: str
    partition: int
