"""DescribeLogDirs (35), versions 1-4: how many bytes each partition has on disk, and how many are free."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from semel.broker.acls import CLUSTER_NAME, Operation, ResourceType
from semel.broker.context import Reply, RequestContext
from semel.broker.pacing import Slices, answer_in_slices, sliced

if TYPE_CHECKING:
    from semel.broker.state import Broker

_UNKNOWN_BYTES: Final = -1


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    return answer_in_slices(broker, context, request, _describe(broker, context, request))


def _describe(broker: Broker, context: RequestContext, request: Any) -> Slices[Mapping[str, Any]]:
    if not broker.authorizer.allows(context, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
        return {"error_code": ErrorCode.cluster_authorization_failed, "results": []}
    directory = str(broker.options.data)
    total_bytes, usable_bytes = _room(directory)
    topics = yield from sliced(_topics(broker, request), weigh=lambda topic: 1 + len(topic["partitions"]))
    found = {
        "error_code": ErrorCode.none,
        "log_dir": directory,
        "topics": [topic for topic in topics if topic["partitions"]],
        "total_bytes": total_bytes,
        "usable_bytes": usable_bytes,
    }
    return {"error_code": ErrorCode.none, "results": [found]}


def _topics(broker: Broker, request: Any) -> Iterator[Mapping[str, Any]]:
    asked: Iterable[tuple[str, Iterable[int]]]
    if request.topics is None:
        asked = ((topic.name, range(topic.partition_count)) for topic in broker.topics)
    else:
        asked = ((item.topic, item.partitions) for item in request.topics)
    return ({"name": name, "partitions": _partitions(broker, name, indexes)} for name, indexes in asked)


def _partitions(broker: Broker, name: str, indexes: Iterable[int]) -> list[Mapping[str, Any]]:
    found = ((index, broker.partition(name, index)) for index in indexes)
    return [
        {
            "partition_index": index,
            "partition_size": partition.size_bytes,
            "offset_lag": 0,
            "is_future_key": False,
        }
        for index, partition in found
        if partition is not None
    ]


def _room(directory: str) -> tuple[int, int]:
    """Size of the file system and what a user may still write to it; unknown where there is none behind the folder."""
    try:
        status = os.statvfs(directory)
    except (OSError, AttributeError):
        return _UNKNOWN_BYTES, _UNKNOWN_BYTES
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
