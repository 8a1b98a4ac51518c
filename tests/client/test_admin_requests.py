"""Every administrative request can be written in every version that the client may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from semel.client.admin import Admin, CommittedOffset
from semel.client.cluster import Cluster, CoordinatorKind, Leader
from semel.client.config import ClientConfig
from semel.client.connection import Pending
from semel.client.item_calls import ItemAnswer, any_broker, call_for_items
from semel.errors import ConnectionLost, KafkaError, WireError
from semel.wire import (
    CLIENT_VERSIONS,
    Api,
    ErrorCode,
    build,
    decode_response,
    encode_request,
    response_type_for,
)


class Written(Exception):
    """The request is complete; no broker is there to answer it."""


class WritingCluster(Cluster):
    """Writes each request in all its versions instead of sending it."""

    def __init__(self) -> None:
        super().__init__(ClientConfig(bootstrap=(("127.0.0.1", 1),)))
        self.controller = 1
        self.written: list[tuple[Api, int]] = []

    def nodes(self) -> Mapping[int, tuple[str, int]]:
        return {1: ("127.0.0.1", 1)}

    def list_topics(self) -> Mapping[str, Mapping[int, Leader]]:
        return {}

    def leader(self, topic: str, partition: int) -> Leader:
        return Leader(1, 0)

    def coordinator(self, kind: CoordinatorKind, key: str) -> int:
        return 1

    def call(self, node: int | None, api: Api, *, highest: int | None = None, **fields: Any) -> Any:
        for version in range(CLIENT_VERSIONS[api].lowest, CLIENT_VERSIONS[api].highest + 1):
            if encode_request(build(api, version, **fields), 1, "test"):
                self.written.append((api, version))
        raise Written

    def submit(self, node: int, api: Api, **options: Any) -> Pending:
        return self.call(node, api, **options)


PARTITION = ("orders", 0)
CALLS: Mapping[Api, list[Callable[[Admin], Any]]] = {
    Api.CREATE_TOPICS: [lambda admin: admin.create_topics("orders", partitions=3, config={"retention.ms": "1"})],
    Api.DELETE_TOPICS: [lambda admin: admin.delete_topics("orders")],
    Api.CREATE_PARTITIONS: [lambda admin: admin.create_partitions("orders", 4)],
    Api.METADATA: [
        lambda admin: admin.list_topics(),
        lambda admin: admin.describe_topics("orders"),
        lambda admin: admin.describe_cluster(),
    ],
    Api.DESCRIBE_CONFIGS: [
        lambda admin: admin.describe_configs("topic", "orders"),
        lambda admin: admin.describe_configs("broker", "1", ["log.dirs"]),
    ],
    Api.INCREMENTAL_ALTER_CONFIGS: [lambda admin: admin.alter_configs("topic", "orders", {"a": "1", "b": None})],
    Api.LIST_OFFSETS: [lambda admin: admin.list_offsets({PARTITION: "latest"})],
    Api.DELETE_RECORDS: [lambda admin: admin.delete_records({PARTITION: 5})],
    Api.LIST_GROUPS: [lambda admin: admin.list_groups()],
    Api.DESCRIBE_GROUPS: [lambda admin: admin.describe_groups("billing")],
    Api.DELETE_GROUPS: [lambda admin: admin.delete_groups("billing")],
    Api.OFFSET_FETCH: [lambda admin: admin.committed_offsets("billing", [PARTITION])],
    Api.OFFSET_COMMIT: [
        lambda admin: admin.commit_offsets("billing", {PARTITION: 5, ("orders", 1): CommittedOffset(6, "note")})
    ],
    Api.OFFSET_DELETE: [lambda admin: admin.delete_offsets("billing", [PARTITION])],
    Api.LIST_TRANSACTIONS: [lambda admin: admin.list_transactions(states=["Ongoing"], producer_ids=[7])],
    Api.DESCRIBE_TRANSACTIONS: [lambda admin: admin.describe_transactions("orders-1")],
    Api.DESCRIBE_PRODUCERS: [lambda admin: admin.describe_producers("orders", 0)],
    Api.WRITE_TXN_MARKERS: [
        lambda admin: admin.abort_transaction("orders", 0, producer_id=7, producer_epoch=1, coordinator_epoch=2)
    ],
}


@pytest.mark.parametrize(
    ("api", "call"),
    [pytest.param(api, call, id=f"{api.name}-{i}") for api in CALLS for i, call in enumerate(CALLS[api])],
)
def test_a_request_is_complete_in_every_version(api: Api, call: Callable[[Admin], Any]) -> None:
    """No version lacks a field or meets one it does not know."""
    cluster = WritingCluster()

    with pytest.raises(Written):
        call(Admin(cluster))

    versions = CLIENT_VERSIONS[api]
    assert cluster.written == [(api, version) for version in range(versions.lowest, versions.highest + 1)]


def test_a_transactional_id_without_a_transaction_can_be_read() -> None:
    """Brokers send -1 for the start of a transaction that is not there."""
    request = build(Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["t"])
    frame = bytes.fromhex(
        "00000001 00"  # correlation id, tags
        "00000000 02"  # throttle time, one state
        "0000 0274 06456d707479 0000ea60 ffffffffffffffff 0000000000000007 0003"  # code, t, Empty, 60 s, -1, id, epoch
        "01 00 00"  # no topics, tags
    )

    [state] = decode_response(response_type_for(request), frame).transaction_states

    assert (state.transaction_start_time_ms, state.producer_id, state.transaction_state) == (-1, 7, "Empty")


class AnsweringCluster(WritingCluster):
    """Gives prepared answers, one after another."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.sleep = lambda seconds: None

    def call(self, node: int | None, api: Api, *, highest: int | None = None, **fields: Any) -> Any:
        self.asked.append(fields)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def created(**codes: ErrorCode) -> Any:
    topics = [SimpleNamespace(name=name, error_code=code, error_message=None) for name, code in codes.items()]
    return SimpleNamespace(topics=topics)


def names_in(fields: Any) -> list[str]:
    return [topic["name"] for topic in fields["topics"]]


def test_only_what_is_not_settled_is_asked_again() -> None:
    """One of two topics is created at once; the other has to wait for the controller."""
    cluster = AnsweringCluster(created(a=ErrorCode.none, b=ErrorCode.not_controller), created(b=ErrorCode.none))

    Admin(cluster).create_topics("a", "b")

    assert [names_in(fields) for fields in cluster.asked] == [["a", "b"], ["b"]]


def test_a_topic_that_exists_after_a_lost_answer_counts_as_created() -> None:
    """The lost request may have been carried out: finding its effect is success."""
    cluster = AnsweringCluster(ConnectionLost("gone"), created(a=ErrorCode.topic_already_exists))

    Admin(cluster).create_topics("a")

    assert len(cluster.asked) == 2


def test_a_topic_that_exists_already_is_an_error() -> None:
    """Without a lost answer it was somebody else's."""
    cluster = AnsweringCluster(created(a=ErrorCode.topic_already_exists))

    with pytest.raises(KafkaError, match="topic 'a'") as caught:
        Admin(cluster).create_topics("a")

    assert caught.value.code == ErrorCode.topic_already_exists


def test_an_answer_that_leaves_out_an_item_is_not_asked_for_for_ever() -> None:
    """A broker that does not mention what was asked is at fault."""
    cluster = AnsweringCluster(SimpleNamespace())

    with pytest.raises(WireError, match="without a word on a"):
        call_for_items(
            cluster,
            any_broker(),
            Api.METADATA,
            ["a"],
            lambda asked: {},
            lambda _: list[ItemAnswer[str, None]](),
            what=str,
        )
