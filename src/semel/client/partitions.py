"""The name of a partition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class TopicPartition(NamedTuple):
    """
    >>> TopicPartition("orders", 3)
    TopicPartition(topic='orders', partition=3)
    """

    topic: str
    partition: int


ByPartition = Mapping[TopicPartition, Value] | Mapping[tuple[str, int], Value]
"""Something for each of several partitions, which callers may also name by plain tuples."""


def by_partition(values: ByPartition[Value]) -> dict[TopicPartition, Value]:
    """
    >>> by_partition({("orders", 3): 17})
    {TopicPartition(topic='orders', partition=3): 17}
    """
    return {TopicPartition(*named): value for named, value in values.items()}
