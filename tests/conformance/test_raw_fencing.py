"""Zombie fencing, request by request: which code each API tells a producer whose epoch is over, version by version."""

from __future__ import annotations

import pytest
from raw import AGES, RawClient
from raw_producer import Identity, RawProducer, init_producer_id
from raw_reading import committed_offset, everything_in, visible_in
from targets import NewTopic, Target

from semel.wire import Api, ErrorCode

# From these versions on a client knows PRODUCER_FENCED; before it is told INVALID_PRODUCER_EPOCH (KIP-588).
FENCED_KNOWN_SINCE = {
    Api.INIT_PRODUCER_ID: 4,
    Api.ADD_PARTITIONS_TO_TXN: 2,
    Api.ADD_OFFSETS_TO_TXN: 2,
    Api.END_TXN: 2,
}

ages = pytest.mark.parametrize("age", AGES)


def fenced_code(target: Target, api: Api, version: int) -> ErrorCode:
    knows = target.has_fenced_code and version >= FENCED_KNOWN_SINCE[api]
    return ErrorCode.producer_fenced if knows else ErrorCode.invalid_producer_epoch


@pytest.fixture
def topic(new_topic: NewTopic) -> str:
    return new_topic()


@pytest.fixture
def successor(raw: RawClient, topic: str, old: Identity) -> RawProducer:
    """Owns the transactional id now, and has a transaction open."""
    successor = RawProducer(raw, topic).begin()
    assert successor.identity == (old.producer_id, old.producer_epoch + 1)
    successor.write(topic, b"of the successor")
    return successor


@pytest.fixture
def old(raw: RawClient, topic: str) -> Identity:
    """An owner that has committed once on protocol 1, which leaves its epoch as it is."""
    first = RawProducer(raw, topic).begin()
    first.write(topic, b"of the first")
    first.commit()
    return first.identity


@ages
def test_add_partitions_of_a_fenced_producer(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: AddPartitionsToTxn with the epoch before."""
    version = raw.version(Api.ADD_PARTITIONS_TO_TXN, age)
    code = successor.add_partitions((topic, 0), identity=old, version=version)
    assert code is fenced_code(target, Api.ADD_PARTITIONS_TO_TXN, version)


@ages
def test_add_offsets_of_a_fenced_producer(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: AddOffsetsToTxn with the epoch before."""
    version = raw.version(Api.ADD_OFFSETS_TO_TXN, age)
    code = successor.add_offsets(f"{topic}-group", identity=old, version=version)
    assert code is fenced_code(target, Api.ADD_OFFSETS_TO_TXN, version)


@ages
@pytest.mark.parametrize("committed", [True, False], ids=["commit", "abort"])
def test_end_of_a_fenced_producer(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str, committed: bool
) -> None:
    """B4: EndTxn with the epoch before cannot end the successor's transaction."""
    version = raw.version(Api.END_TXN, age)
    answer = successor.end(committed, identity=old, version=version)
    assert answer.error_code is fenced_code(target, Api.END_TXN, version)
    successor.commit()
    assert visible_in(raw, topic) == [b"of the first", b"of the successor"]


@ages
def test_a_bump_of_a_fenced_producer(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4 (KIP-360): InitProducerId with the epoch before does not take the id back."""
    successor.commit()
    version = raw.version(Api.INIT_PRODUCER_ID, age, lowest=3)
    answer = init_producer_id(raw, topic, version=version, identity=old)
    assert answer.error_code is fenced_code(target, Api.INIT_PRODUCER_ID, version)
    assert (answer.producer_id, answer.producer_epoch) == (-1, -1)
    assert successor.write(topic, b"goes on") > 0


@ages
def test_a_write_of_a_fenced_producer(
    raw: RawClient, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: Produce with the epoch before is always INVALID_PRODUCER_EPOCH, which older clients know too."""
    version = raw.version(Api.PRODUCE, age)
    answer = successor.produce(topic, b"of a zombie", sequence=1, identity=old, version=version)
    assert (answer.error_code, answer.base_offset) == (ErrorCode.invalid_producer_epoch, -1)
    successor.commit()
    values = [one.value for one in everything_in(raw, topic) if not one.is_control]
    assert values == [b"of the first", b"of the successor"]


@pytest.mark.needs("verifies_partitions")
@ages
def test_a_write_of_a_fenced_producer_where_the_successor_has_not_been(
    raw: RawClient, new_topic: NewTopic, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4 (KIP-890): a partition that knows no newer epoch asks the coordinator."""
    other = new_topic()
    version = raw.version(Api.PRODUCE, age)
    answer = successor.produce(other, b"of a zombie", sequence=0, identity=old, version=version)
    assert answer.error_code is ErrorCode.invalid_producer_epoch
    assert everything_in(raw, other) == []


@pytest.mark.needs("verifies_partitions")
@ages
def test_offsets_of_a_fenced_producer(
    raw: RawClient, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: TxnOffsetCommit with the epoch before is INVALID_PRODUCER_EPOCH."""
    group = f"{topic}-group"
    successor.add_offsets(group)
    version = raw.version(Api.TXN_OFFSET_COMMIT, age)
    code = successor.commit_offsets(group, {(topic, 0): 5}, identity=old, version=version)
    assert code is ErrorCode.invalid_producer_epoch
    successor.commit()
    assert committed_offset(raw, group, topic) == (ErrorCode.none, -1)


@pytest.mark.parametrize("protocol", [2])
def test_protocol_2_requests_of_a_fenced_producer(
    raw: RawClient, topic: str, old: Identity, successor: RawProducer, protocol: int
) -> None:
    """B4, B7: the versions that add partitions and groups by themselves fence like the others."""
    assert protocol == 2
    zombie = RawProducer(raw, topic, old, protocol=2)
    assert zombie.produce(topic, b"x", sequence=0).error_code is ErrorCode.invalid_producer_epoch
    assert zombie.commit_offsets(f"{topic}-group", {(topic, 0): 5}) is ErrorCode.invalid_producer_epoch
    successor.commit()
    assert visible_in(raw, topic) == [b"of the first", b"of the successor"]


@ages
def test_an_epoch_that_was_never_given_is_fenced_too(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: only the present epoch counts; one above it is nobody's."""
    never = Identity(old.producer_id, old.producer_epoch + 5)
    for api in (Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.END_TXN):
        version = raw.version(api, age)
        code = {
            Api.ADD_PARTITIONS_TO_TXN: lambda v: successor.add_partitions((topic, 0), identity=never, version=v),
            Api.ADD_OFFSETS_TO_TXN: lambda v: successor.add_offsets("g", identity=never, version=v),
            Api.END_TXN: lambda v: successor.end(True, identity=never, version=v).error_code,
        }[api](version)
        assert code is fenced_code(target, api, version), api


@ages
def test_another_producer_id_is_a_wrong_mapping(
    raw: RawClient, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4: a producer id that the transactional id does not have, and a transactional id that nobody has."""
    stranger = Identity(old.producer_id + 1_000_000, 0)
    nobody = RawProducer(raw, f"{topic}-unknown", old, age=age)
    for producer, identity in ((successor, stranger), (nobody, old)):
        producer.age = age
        assert producer.add_partitions((topic, 0), identity=identity) is ErrorCode.invalid_producer_id_mapping
        assert producer.add_offsets("g", identity=identity) is ErrorCode.invalid_producer_id_mapping
        assert producer.end(True, identity=identity).error_code is ErrorCode.invalid_producer_id_mapping


@ages
def test_a_bump_with_another_producer_id_is_fenced(
    raw: RawClient, target: Target, topic: str, old: Identity, successor: RawProducer, age: str
) -> None:
    """B4 (KIP-360): it was somebody's once, and is not the owner's now."""
    version = raw.version(Api.INIT_PRODUCER_ID, age, lowest=3)
    stranger = Identity(old.producer_id + 1_000_000, 0)
    answer = init_producer_id(raw, topic, version=version, identity=stranger)
    assert answer.error_code is fenced_code(target, Api.INIT_PRODUCER_ID, version)
    successor.commit()


@ages
def test_a_new_incarnation_aborts_what_the_last_one_left_open(
    raw: RawClient, target: Target, topic: str, age: str
) -> None:
    """B3, B4: its epoch is above the one that the abort took, and the old owner's end comes too late."""
    crashed = RawProducer(raw, topic).begin()
    crashed.write(topic, b"never committed")
    version = raw.version(Api.INIT_PRODUCER_ID, age)
    fields = {"transactional_id": topic, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
    first = raw.call(Api.INIT_PRODUCER_ID, version, **fields)
    assert first.error_code is ErrorCode.concurrent_transactions
    heir = RawProducer(raw, topic, age=age).begin()
    assert heir.identity == (crashed.identity.producer_id, crashed.identity.producer_epoch + 2)
    late = crashed.end(True)
    assert late.error_code is fenced_code(target, Api.END_TXN, crashed.version(Api.END_TXN))
    heir.write(topic, b"of the heir")
    heir.commit()
    assert visible_in(raw, topic) == [b"of the heir"]
    markers = [
        (one.producer_epoch - crashed.identity.producer_epoch) for one in everything_in(raw, topic) if one.is_control
    ]
    assert markers == [1, 2]
