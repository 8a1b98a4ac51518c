"""The APIs about topics: each in every version that is served, from bytes to bytes, and the rules behind them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from handler_calls import ADDRESS, SmallBroker, ask
from kio.schema.errors import ErrorCode
from memory_meta import MemoryMeta

from semel.broker.acls import AclBinding, Authorizer, Operation, ResourceType
from semel.broker.topics import OFFSETS_TOPIC, TRANSACTION_TOPIC
from semel.wire.api import Api
from semel.wire.server import SERVER_VERSIONS

NOT_ASKED = -(2**31)
MISSING_ID = UUID(int=5)


def versions(api: Api) -> Any:
    served = SERVER_VERSIONS[api]
    return pytest.mark.parametrize("version", range(served.lowest, served.highest + 1))


@pytest.fixture
def broker() -> SmallBroker:
    return SmallBroker()


def restrict(broker: SmallBroker, *allowed: tuple[ResourceType, str, Operation]) -> None:
    """From now on only these are allowed, to everybody."""
    broker.authorizer = Authorizer()
    broker.authorizer.add([AclBinding(kind, name, operation=operation) for kind, name, operation in allowed])


def codes(items: Any) -> list[ErrorCode]:
    return [item.error_code for item in items]


# -- Metadata ----------------------------------------------------------------------------------------------------------


def metadata(broker: SmallBroker, version: int, names: list[str] | None, **fields: Any) -> Any:
    asked = {
        "topics": None if names is None else [{"name": name, "topic_id": None} for name in names],
        "allow_auto_topic_creation": False,
        "include_cluster_authorized_operations": False,
        "include_topic_authorized_operations": False,
    }
    return ask(broker, Api.METADATA, version, **(asked | fields))


@versions(Api.METADATA)
def test_metadata_tells_where_a_topic_is(broker: SmallBroker, version: int) -> None:
    """This broker leads every partition, in every version of the answer."""
    topic = broker.new_topic("orders", 2)
    answer = metadata(broker, version, ["orders"])
    [node] = answer.brokers
    assert (node.node_id, node.host, node.port) == (1, *ADDRESS)
    [found] = answer.topics
    assert (found.error_code, found.name) == (ErrorCode.none, "orders")
    assert [(each.partition_index, each.leader_id, each.isr_nodes) for each in found.partitions] == [
        (0, 1, (1,)),
        (1, 1, (1,)),
    ]
    assert getattr(found, "topic_id", topic.topic_id) == topic.topic_id
    assert getattr(found, "topic_authorized_operations", NOT_ASKED) == NOT_ASKED
    assert getattr(answer, "cluster_authorized_operations", NOT_ASKED) == NOT_ASKED
    assert getattr(answer, "controller_id", 1) == 1
    assert getattr(answer, "cluster_id", broker.topics.cluster_id) == broker.topics.cluster_id


def test_metadata_of_all_topics_and_of_none(broker: SmallBroker) -> None:
    """Version 0 says "all" with an empty list, later ones with null."""
    broker.new_topic("a")
    broker.new_topic("b")
    assert [topic.name for topic in metadata(broker, 0, []).topics] == ["a", "b"]
    assert metadata(broker, 1, []).topics == ()
    assert [topic.name for topic in metadata(broker, 1, None).topics] == ["a", "b"]


def test_metadata_creates_a_topic_when_client_and_broker_want_it(broker: SmallBroker) -> None:
    """It is answered as ready at once, with the broker's partition count; version 3 cannot say no."""
    assert codes(metadata(broker, 12, ["a"]).topics) == [ErrorCode.unknown_topic_or_partition]
    assert "a" not in broker.topics
    [created] = metadata(broker, 12, ["a"], allow_auto_topic_creation=True).topics
    assert (created.error_code, len(created.partitions)) == (ErrorCode.none, 1)
    assert codes(metadata(broker, 3, ["b"]).topics) == [ErrorCode.none]
    assert "b" in broker.topics


def test_metadata_creates_nothing_where_the_broker_does_not_want_it() -> None:
    """auto.create.topics.enable=false; a name that could never be a topic is told apart."""
    broker = SmallBroker(auto_create_topics_enable=False)
    answer = metadata(broker, 12, ["a", "sp ace", ""], allow_auto_topic_creation=True)
    assert codes(answer.topics) == [
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_topic_exception,
    ]
    assert len(broker.topics) == 0


def test_metadata_that_would_create_a_bad_topic_says_why(broker: SmallBroker) -> None:
    """Bad names and colliding names are refused; an internal topic gets its own shape."""
    broker.new_topic("a.b")
    answer = metadata(broker, 12, ["sp ace", "a_b", OFFSETS_TOPIC], allow_auto_topic_creation=True)
    assert codes(answer.topics) == [
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_topic_exception,
        ErrorCode.none,
    ]
    assert (answer.topics[2].is_internal, len(answer.topics[2].partitions)) == (True, 4)


def test_metadata_by_topic_id(broker: SmallBroker) -> None:
    """From version 12 on, with no name or, as Java has it, an empty one; a missing id has its own code."""
    topic = broker.new_topic("a")
    asked = [{"name": name, "topic_id": topic.topic_id} for name in (None, "")]
    found, again, missing = metadata(broker, 12, None, topics=[*asked, {"name": None, "topic_id": MISSING_ID}]).topics
    assert (found.name, found.topic_id) == ("a", topic.topic_id)
    assert again == found
    assert (missing.error_code, missing.name, missing.topic_id) == (ErrorCode.unknown_topic_id, None, MISSING_ID)


def test_metadata_tells_authorized_operations_when_asked(broker: SmallBroker) -> None:
    """As bit fields: Kafka's numbers for somebody who may do everything."""
    broker.new_topic("a")
    answer = metadata(
        broker,
        8,
        ["a"],
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    assert answer.topics[0].topic_authorized_operations == 3576
    assert answer.cluster_authorized_operations == 8096


def test_metadata_hides_topics_from_the_unauthorized(broker: SmallBroker) -> None:
    """Named ones are refused, by id without their name; in a list of all they are left out; none is created."""
    hidden = broker.new_topic("hidden")
    broker.new_topic("open")
    restrict(broker, (ResourceType.TOPIC, "open", Operation.DESCRIBE), (ResourceType.TOPIC, "new", Operation.DESCRIBE))
    assert [topic.name for topic in metadata(broker, 12, None).topics] == ["open"]
    named = metadata(broker, 12, ["hidden", "new"], allow_auto_topic_creation=True)
    assert codes(named.topics) == [ErrorCode.topic_authorization_failed] * 2
    [by_id] = metadata(broker, 12, None, topics=[{"name": None, "topic_id": hidden.topic_id}]).topics
    assert (by_id.error_code, by_id.name) == (ErrorCode.topic_authorization_failed, None)
    assert "new" not in broker.topics
    restrict(broker, (ResourceType.TOPIC, "new", Operation.ALL))
    assert codes(metadata(broker, 12, ["new"], allow_auto_topic_creation=True).topics) == [ErrorCode.none]


def test_metadata_of_a_partition_that_is_not_open_has_no_leader(broker: SmallBroker) -> None:
    """Its clients wait and ask again."""
    broker.new_topic("a", 2)
    del broker.partitions["a", 1]
    [topic] = metadata(broker, 12, ["a"]).topics
    assert codes(topic.partitions) == [ErrorCode.none, ErrorCode.leader_not_available]
    assert topic.partitions[1].leader_id == -1


# -- FindCoordinator ---------------------------------------------------------------------------------------------------


@versions(Api.FIND_COORDINATOR)
def test_the_coordinator_is_this_broker(broker: SmallBroker, version: int) -> None:
    """For groups in every version and for transactional ids from version 1; the internal topic is there then."""
    for key_type, topic in ((0, OFFSETS_TOPIC), (1, TRANSACTION_TOPIC)):
        if version == 0 and key_type == 1:
            continue
        answer = ask(broker, Api.FIND_COORDINATOR, version, key="k", coordinator_keys=["k"], key_type=key_type)
        [found] = answer.coordinators if version >= 4 else [answer]
        assert (found.error_code, found.node_id, found.host, found.port) == (ErrorCode.none, 1, *ADDRESS)
        assert topic in broker.topics


def test_several_coordinators_are_found_at_once(broker: SmallBroker) -> None:
    """Each key has its own answer; one that the client may not know is refused."""
    restrict(broker, (ResourceType.GROUP, "a", Operation.DESCRIBE))
    answer = ask(broker, Api.FIND_COORDINATOR, 4, coordinator_keys=["a", "b"], key_type=0)
    assert [(found.key, found.error_code) for found in answer.coordinators] == [
        ("a", ErrorCode.none),
        ("b", ErrorCode.group_authorization_failed),
    ]
    refused = ask(broker, Api.FIND_COORDINATOR, 3, key="t", key_type=1)
    assert refused.error_code is ErrorCode.transactional_id_authorization_failed


def test_no_coordinator_for_what_is_not_known_or_cannot_be_stored() -> None:
    """A share group, and a disk on which the internal topic cannot be created."""
    meta = MemoryMeta()
    broker = SmallBroker(meta=meta)
    [share] = ask(broker, Api.FIND_COORDINATOR, 6, coordinator_keys=["s"], key_type=2).coordinators
    assert (share.error_code, share.node_id) == (ErrorCode.invalid_request, -1)
    meta.writes_until_full = 0
    assert ask(broker, Api.FIND_COORDINATOR, 2, key="g", key_type=0).error_code is ErrorCode.coordinator_not_available


# -- CreateTopics ------------------------------------------------------------------------------------------------------


def new_topic(name: str, partitions: int = 1, replication: int = 1, **fields: Any) -> dict[str, Any]:
    shape = {"num_partitions": partitions, "replication_factor": replication, "assignments": [], "configs": []}
    return {"name": name, **shape, **fields}


def create(broker: SmallBroker, version: int, *topics: dict[str, Any], validate_only: bool = False) -> Any:
    return ask(
        broker, Api.CREATE_TOPICS, version, topics=list(topics), timeout=1000, validate_only=validate_only
    ).topics


@versions(Api.CREATE_TOPICS)
def test_topics_are_created(broker: SmallBroker, version: int) -> None:
    """With partitions and configs; newer versions answer with both, and with the id."""
    configs = [{"name": "retention.ms", "value": "5"}]
    [created] = create(broker, version, new_topic("a", 2, configs=configs))
    assert (created.error_code, created.name) == (ErrorCode.none, "a")
    topic = broker.topics.get("a")
    assert topic is not None
    assert (topic.partition_count, topic.configs) == (2, {"retention.ms": "5"})
    assert getattr(created, "num_partitions", 2) == 2
    assert getattr(created, "replication_factor", 1) == 1
    assert getattr(created, "topic_id", topic.topic_id) == topic.topic_id
    if version >= 5:
        [retention] = [config for config in created.configs if config.name == "retention.ms"]
        assert (retention.value, retention.config_source) == ("5", 1)


def test_a_creation_that_is_only_checked_changes_nothing(broker: SmallBroker) -> None:
    """validate_only finds the same mistakes and answers with the same shape."""
    good, bad = create(broker, 7, new_topic("a", -1, -1), new_topic("b", 0), validate_only=True)
    assert (good.error_code, good.num_partitions, good.topic_id) == (ErrorCode.none, 1, None)
    assert bad.error_code is ErrorCode.invalid_partitions
    assert len(broker.topics) == 0


def test_each_mistake_in_a_creation_is_told_apart(broker: SmallBroker) -> None:
    """The good one among them is created all the same."""
    answers = create(
        broker,
        7,
        new_topic("good"),
        new_topic("sp ace"),
        new_topic("two", replication=2),
        new_topic("config", configs=[{"name": "nope", "value": "1"}]),
        new_topic("assigned", -1, -1, assignments=[{"partition_index": 0, "broker_ids": [1]}] * 2),
        new_topic("twice"),
        new_topic("twice"),
    )
    assert {answer.name: answer.error_code for answer in answers} == {
        "good": ErrorCode.none,
        "sp ace": ErrorCode.invalid_topic_exception,
        "two": ErrorCode.invalid_replication_factor,
        "config": ErrorCode.invalid_config,
        "assigned": ErrorCode.invalid_replica_assignment,
        "twice": ErrorCode.invalid_request,
    }
    assert len(answers) == 6
    assert [topic.name for topic in broker.topics] == ["good"]
    assert codes(create(broker, 7, new_topic("good"))) == [ErrorCode.topic_already_exists]


def test_too_many_partitions_in_one_request_are_refused(broker: SmallBroker) -> None:
    """10,000 at most, as in Kafka; nothing of the request is done."""
    assert codes(create(broker, 7, new_topic("a", 9_999), new_topic("b", 2))) == [ErrorCode.policy_violation] * 2
    assert len(broker.topics) == 0


def test_creation_needs_the_right_on_the_cluster_or_the_topic(broker: SmallBroker) -> None:
    """Who may create but not describe configs is not told them."""
    restrict(broker, (ResourceType.TOPIC, "mine", Operation.CREATE))
    mine, other = create(broker, 7, new_topic("mine"), new_topic("other"))
    assert (mine.error_code, mine.topic_config_error_code, mine.configs) == (ErrorCode.none, 29, None)
    assert other.error_code is ErrorCode.topic_authorization_failed
    restrict(broker, (ResourceType.CLUSTER, "kafka-cluster", Operation.CREATE))
    assert codes(create(broker, 2, new_topic("any"))) == [ErrorCode.none]


def test_a_topic_that_cannot_be_stored_is_not_created() -> None:
    """KAFKA_STORAGE_ERROR, and no trace."""
    meta = MemoryMeta()
    broker = SmallBroker(meta=meta)
    meta.writes_until_full = 0
    assert codes(create(broker, 7, new_topic("a"))) == [ErrorCode.kafka_storage_error]
    assert len(broker.topics) == 0


# -- DeleteTopics ------------------------------------------------------------------------------------------------------


def delete(broker: SmallBroker, version: int, *names: str, ids: tuple[UUID, ...] = ()) -> Any:
    topics = [{"name": name, "topic_id": None} for name in names] + [{"name": None, "topic_id": each} for each in ids]
    return ask(broker, Api.DELETE_TOPICS, version, topics=topics, topic_names=list(names), timeout=1000).responses


@versions(Api.DELETE_TOPICS)
def test_topics_are_deleted(broker: SmallBroker, version: int) -> None:
    """With their partitions; one that is not there is an error of its own."""
    broker.new_topic("a")
    assert [(each.name, each.error_code) for each in delete(broker, version, "a", "missing")] == [
        ("a", ErrorCode.none),
        ("missing", ErrorCode.unknown_topic_or_partition),
    ]
    assert len(broker.topics) == 0
    assert broker.partitions == {}


def test_topics_are_deleted_by_id(broker: SmallBroker) -> None:
    """Version 6; an unknown id has its own code, and name and id together are refused."""
    topic = broker.new_topic("a")
    both = {"name": "b", "topic_id": MISSING_ID}
    answer = ask(broker, Api.DELETE_TOPICS, 6, topics=[both, {"name": None, "topic_id": None}], timeout=1).responses
    assert codes(answer) == [ErrorCode.invalid_request] * 2
    deleted, missing = delete(broker, 6, ids=(topic.topic_id, MISSING_ID))
    assert (deleted.name, deleted.topic_id, deleted.error_code) == ("a", topic.topic_id, ErrorCode.none)
    assert (missing.name, missing.error_code) == (None, ErrorCode.unknown_topic_id)


def test_deletions_that_are_not_allowed(broker: SmallBroker) -> None:
    """Twice in one request, internal topics, without the right, and where deletion is switched off."""
    broker.new_topic("a")
    assert codes(delete(broker, 6, "a", "a")) == [ErrorCode.invalid_request]
    broker.ensure_internal_topic(OFFSETS_TOPIC)
    assert codes(delete(broker, 6, OFFSETS_TOPIC)) == [ErrorCode.policy_violation]
    restrict(broker, (ResourceType.TOPIC, "a", Operation.DESCRIBE))
    assert codes(delete(broker, 6, "a", "hidden")) == [ErrorCode.topic_authorization_failed] * 2
    fixed = SmallBroker(delete_topic_enable=False)
    fixed.new_topic("a")
    assert codes(delete(fixed, 6, "a")) == [ErrorCode.topic_deletion_disabled]
    assert codes(delete(fixed, 2, "a")) == [ErrorCode.invalid_request]
    assert "a" in broker.topics
    assert "a" in fixed.topics


def test_an_id_does_not_tell_a_hidden_name(broker: SmallBroker) -> None:
    """Who may not describe the topic gets the code and no name."""
    topic = broker.new_topic("secret")
    restrict(broker)
    [answer] = delete(broker, 6, ids=(topic.topic_id,))
    assert (answer.error_code, answer.name) == (ErrorCode.topic_authorization_failed, None)


# -- CreatePartitions --------------------------------------------------------------------------------------------------


def grow(broker: SmallBroker, version: int, *asked: tuple[str, int], validate_only: bool = False) -> Any:
    topics = [{"name": name, "count": count, "assignments": None} for name, count in asked]
    return ask(broker, Api.CREATE_PARTITIONS, version, topics=topics, timeout=1000, validate_only=validate_only).results


@versions(Api.CREATE_PARTITIONS)
def test_a_topic_gets_more_partitions(broker: SmallBroker, version: int) -> None:
    """They are open when it is answered; fewer, or of a missing topic, is refused."""
    broker.new_topic("a", 1)
    broker.new_topic("b", 3)
    assert codes(grow(broker, version, ("a", 3), ("b", 2), ("c", 2))) == [
        ErrorCode.none,
        ErrorCode.invalid_partitions,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert broker.partition("a", 2) is not None


def test_growth_that_is_not_allowed(broker: SmallBroker) -> None:
    """Twice in one request, only checked, without the right."""
    broker.new_topic("a")
    assert codes(grow(broker, 3, ("a", 2), ("a", 3))) == [ErrorCode.invalid_request]
    assert codes(grow(broker, 3, ("a", 2), validate_only=True)) == [ErrorCode.none]
    restrict(broker, (ResourceType.TOPIC, "a", Operation.DESCRIBE))
    assert codes(grow(broker, 3, ("a", 2))) == [ErrorCode.topic_authorization_failed]
    assert broker.partition("a", 1) is None


# -- DescribeTopicPartitions -------------------------------------------------------------------------------------------


def page(broker: SmallBroker, names: list[str], limit: int = 2000, cursor: tuple[str, int] | None = None) -> Any:
    return ask(
        broker,
        Api.DESCRIBE_TOPIC_PARTITIONS,
        0,
        topics=[{"name": name} for name in names],
        response_partition_limit=limit,
        cursor=None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]},
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_together_are_all_partitions(broker: SmallBroker, limit: int) -> None:
    """Whatever the size of a page, each partition is told once, in order."""
    for name, count in (("b", 3), ("a", 2), ("c", 1)):
        broker.new_topic(name, count)
    told: list[tuple[str, int]] = []
    cursor: tuple[str, int] | None = None
    for _ in range(10):
        answer = page(broker, [], limit, cursor)
        told += [(topic.name, each.partition_index) for topic in answer.topics for each in topic.partitions]
        if answer.next_cursor is None:
            break
        cursor = (answer.next_cursor.topic_name, answer.next_cursor.partition_index)
    assert told == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]


def test_named_topics_are_paged_with_their_errors(broker: SmallBroker) -> None:
    """Missing and forbidden names have their code; the limit is never below one."""
    broker.new_topic("a", 2)
    broker.new_topic("hidden")
    restrict(broker, (ResourceType.TOPIC, "a", Operation.DESCRIBE), (ResourceType.TOPIC, "x", Operation.DESCRIBE))
    answer = page(broker, ["x", "hidden", "a"])
    assert [(topic.name, topic.error_code) for topic in answer.topics] == [
        ("a", ErrorCode.none),
        ("hidden", ErrorCode.topic_authorization_failed),
        ("x", ErrorCode.unknown_topic_or_partition),
    ]
    assert [topic.name for topic in page(broker, []).topics] == ["a"]
    assert page(broker, ["a"], limit=0).next_cursor.partition_index == 1


# -- records and sizes -------------------------------------------------------------------------------------------------


def delete_records(broker: SmallBroker, version: int, name: str, index: int, offset: int) -> tuple[ErrorCode, int]:
    asked = [{"name": name, "partitions": [{"partition_index": index, "offset": offset}]}]
    [answer] = ask(broker, Api.DELETE_RECORDS, version, topics=asked, timeout=1000).topics[0].partitions
    return answer.error_code, answer.low_watermark


@versions(Api.DELETE_RECORDS)
def test_records_are_deleted_up_to_an_offset(broker: SmallBroker, version: int) -> None:
    """-1 is all of them; beyond the end is refused; an earlier offset than the start changes nothing."""
    broker.new_topic("a")
    broker.partitions["a", 0].fill(10)
    assert delete_records(broker, version, "a", 0, 4) == (ErrorCode.none, 4)
    assert delete_records(broker, version, "a", 0, 2) == (ErrorCode.none, 4)
    assert delete_records(broker, version, "a", 0, 11) == (ErrorCode.offset_out_of_range, -1)
    assert delete_records(broker, version, "a", 0, -1) == (ErrorCode.none, 10)
    assert delete_records(broker, version, "a", 1, 0) == (ErrorCode.unknown_topic_or_partition, -1)


def test_records_that_may_not_be_deleted(broker: SmallBroker) -> None:
    """Compacted topics, internal ones, without the right, and on a disk that refuses."""
    broker.new_topic("compacted", cleanup_policy="compact")
    assert delete_records(broker, 2, "compacted", 0, 0)[0] is ErrorCode.policy_violation
    broker.ensure_internal_topic(OFFSETS_TOPIC)
    assert delete_records(broker, 2, OFFSETS_TOPIC, 0, 0)[0] is ErrorCode.invalid_topic_exception
    broker.new_topic("a")

    def fail(offset: int) -> int:
        raise OSError(28, "No space left on device")

    broker.partitions["a", 0].delete_records = fail
    assert delete_records(broker, 2, "a", 0, 0)[0] is ErrorCode.kafka_storage_error
    assert len(broker.storage_errors) == 1
    restrict(broker, (ResourceType.TOPIC, "a", Operation.READ))
    assert delete_records(broker, 2, "a", 0, 0)[0] is ErrorCode.topic_authorization_failed


def end_of_epoch(broker: SmallBroker, version: int, name: str, current: int, epoch: int) -> tuple[ErrorCode, int, int]:
    partition = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
    topics = [{"topic": name, "partitions": [partition]}]
    [answer] = ask(broker, Api.OFFSET_FOR_LEADER_EPOCH, version, replica_id=-1, topics=topics).topics[0].partitions
    return answer.error_code, answer.leader_epoch, answer.end_offset


@versions(Api.OFFSET_FOR_LEADER_EPOCH)
def test_the_one_leader_epoch_ends_at_the_log_end(broker: SmallBroker, version: int) -> None:
    """Later epochs have not been; none is undefined. The values are Kafka's for a topic that never moved."""
    broker.new_topic("a")
    broker.partitions["a", 0].fill(10)
    assert end_of_epoch(broker, version, "a", -1, 0) == (ErrorCode.none, 0, 10)
    assert end_of_epoch(broker, version, "a", 0, 1) == (ErrorCode.none, -1, -1)
    assert end_of_epoch(broker, version, "a", -1, -1) == (ErrorCode.none, -1, -1)
    assert end_of_epoch(broker, version, "a", 1, 0) == (ErrorCode.unknown_leader_epoch, -1, -1)
    assert end_of_epoch(broker, version, "b", -1, 0) == (ErrorCode.unknown_topic_or_partition, -1, -1)
    restrict(broker)
    assert end_of_epoch(broker, version, "a", -1, 0) == (ErrorCode.topic_authorization_failed, -1, -1)


@versions(Api.DESCRIBE_LOG_DIRS)
def test_sizes_on_disk_are_told(version: int, tmp_path: Any) -> None:
    """Of all partitions or of those named, with the room that is left from version 4 on."""
    broker = SmallBroker(data=str(tmp_path))
    broker.new_topic("a", 2)
    broker.new_topic("b")
    broker.partitions["a", 1].fill(3)
    [everything] = ask(broker, Api.DESCRIBE_LOG_DIRS, version, topics=None).results
    assert everything.log_dir == str(tmp_path)
    assert {
        (topic.name, each.partition_index): each.partition_size
        for topic in everything.topics
        for each in topic.partitions
    } == {("a", 0): 0, ("a", 1): 300, ("b", 0): 0}
    if version >= 4:
        assert everything.total_bytes >= everything.usable_bytes > 0
    asked = [{"topic": "a", "partitions": [1, 99]}, {"topic": "missing", "partitions": [0]}]
    [some] = ask(broker, Api.DESCRIBE_LOG_DIRS, version, topics=asked).results
    assert [(topic.name, [each.partition_index for each in topic.partitions]) for topic in some.topics] == [("a", [1])]


def test_sizes_are_for_those_who_may_describe_the_cluster(broker: SmallBroker) -> None:
    """Otherwise a code and nothing; a folder that no file system is behind has no sizes."""
    [result] = ask(broker, Api.DESCRIBE_LOG_DIRS, 4, topics=None).results
    assert (result.total_bytes, result.usable_bytes) == (-1, -1)
    restrict(broker)
    answer = ask(broker, Api.DESCRIBE_LOG_DIRS, 4, topics=None)
    assert (answer.error_code, answer.results) == (ErrorCode.cluster_authorization_failed, ())
