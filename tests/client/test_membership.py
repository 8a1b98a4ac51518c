"""Members of groups on the embedded broker, with every assignor and KIP-848, alone, together and beside librdkafka."""

from __future__ import annotations

import time
from collections.abc import Iterator

import confluent_kafka
import pytest
from group_scene import BROKER_CONFIG, SESSION_TIMEOUT_MS, Hands, Scene, wait_until
from kio.schema.errors import ErrorCode

from semel.broker.faults import Cut, Error
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import ConfigError, Fenced, KafkaError, SemelError
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api

PROTOCOLS = ["range", "roundrobin", "sticky", "cooperative-sticky", "consumer"]
BOTH = ["cooperative-sticky", "consumer"]


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_share_the_partitions_and_whoever_is_left_gets_all(broker: EmbeddedBroker, protocol: str) -> None:
    """Two that come one after the other, and one that goes politely: no session time-out is waited for."""
    scene = Scene(broker.bootstrap, protocol)
    with scene.member() as first:
        scene.wait_shared(first)
        with scene.member() as second:
            shares = scene.wait_shared(first, second)
            assert sorted(len(share) for share in shares) == [2, 2]
        started = time.monotonic()
        scene.wait_shared(first)
        assert time.monotonic() - started < 2.5


@pytest.mark.parametrize("protocol", BOTH)
def test_what_stays_is_never_given_up_and_what_moves_is_gained_anew(broker: EmbeddedBroker, protocol: str) -> None:
    """A tenure's number tells a partition that was kept from one that came back."""
    scene, hands = Scene(broker.bootstrap, protocol), Hands()
    with scene.member(hands) as first:
        scene.wait_shared(first)
        before = first.tenures
        with scene.member() as second:
            kept = scene.wait_shared(first, second)[0]
            assert {p.partition: t for p, t in first.tenures.items()} == {
                p.partition: t for p, t in before.items() if p.partition in kept
            }
        scene.wait_shared(first)
        after = first.tenures
        assert {p.partition for p in after if after[p] == before[p]} == kept
    assert {p.partition for released in hands.asked_for for p in released} == {0, 1, 2, 3} - kept


def test_eager_assignors_give_everything_up_in_every_rebalance(broker: EmbeddedBroker) -> None:
    """So that what is given back may have been another's in between."""
    scene, hands = Scene(broker.bootstrap, "range"), Hands()
    with scene.member(hands) as first:
        scene.wait_shared(first)
        before = set(first.tenures.values())
        with scene.member() as second:
            scene.wait_shared(first, second)
            assert not before & set(first.tenures.values())
    assert len(hands.asked_for[0]) == 4


@pytest.mark.parametrize("protocol", ["range", *BOTH])
def test_a_rebalance_waits_for_whoever_still_needs_its_partitions(broker: EmbeddedBroker, protocol: str) -> None:
    """Heartbeats go on meanwhile, beyond the session time-out, and the newcomer gets nothing."""
    scene, hands = Scene(broker.bootstrap, protocol), Hands()
    with scene.member(hands) as first:
        scene.wait_shared(first)
        hands.agrees = False
        with scene.member() as second:
            wait_until(lambda: bool(hands.asked_for), "the question whether partitions can be given up")
            time.sleep(SESSION_TIMEOUT_MS / 1000 + 0.5)
            assert (len(first.tenures), len(second.tenures), hands.was_lost) == (4, 0, [])
            hands.agrees = True
            scene.wait_shared(first, second)


@pytest.mark.parametrize("protocol", ["range", *BOTH])
def test_who_says_nothing_for_its_session_is_removed_and_its_partitions_are_others(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """A crash: the survivor has everything after the time-out."""
    scene = Scene(broker.bootstrap, protocol)
    with scene.member() as first, scene.member() as crashed:
        scene.wait_shared(first, crashed)
        crashed.close(leave=False)
        scene.wait_shared(first)


@pytest.mark.parametrize("protocol", BOTH)
def test_a_member_that_was_removed_is_told_that_its_partitions_are_lost_and_joins_anew(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """The broker's word for it reaches the holder at once, whether it would have agreed or not."""
    scene, hands = Scene(broker.bootstrap, protocol), Hands()
    hands.agrees = False
    api, code = {
        "consumer": (Api.CONSUMER_GROUP_HEARTBEAT, ErrorCode.fenced_member_epoch),
        "cooperative-sticky": (Api.HEARTBEAT, ErrorCode.unknown_member_id),
    }[protocol]
    with scene.member(hands) as member:
        scene.wait_shared(member)
        before = set(member.tenures.values())
        fault = broker.faults.inject(api, Error(code), when=lambda request: request.group_id == scene.group)
        wait_until(lambda: fault.served == 1 and bool(hands.was_lost), "the loss")
        scene.wait_shared(member)
        assert not before & set(member.tenures.values())
        assert len(hands.was_lost[0]) == 4


@pytest.mark.parametrize("protocol", ["range", *BOTH])
@pytest.mark.parametrize("carried_out", [False, True])
def test_lost_answers_leave_the_member_in_its_group(broker: EmbeddedBroker, protocol: str, carried_out: bool) -> None:
    """Every kind of request cut once, before it is carried out or after."""
    scene = Scene(broker.bootstrap, protocol)
    apis = [Api.CONSUMER_GROUP_HEARTBEAT] if protocol == "consumer" else [Api.JOIN_GROUP, Api.SYNC_GROUP, Api.HEARTBEAT]
    faults = [
        broker.faults.inject(api, Cut(carried_out), skip=skip, when=lambda request: request.group_id == scene.group)
        for api in apis
        for skip in (0, 1)
    ]
    with scene.member() as first, scene.member() as second:
        wait_until(lambda: all(fault.served for fault in faults), "every cut")
        scene.wait_shared(first, second)
    broker.faults.clear()


@pytest.mark.parametrize("protocol", ["range", *BOTH])
def test_a_static_member_comes_back_to_its_partitions_without_a_rebalance(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """KIP-345: the other member notices nothing."""
    scene, hands = Scene(broker.bootstrap, protocol), Hands()
    with scene.member(hands, group_instance_id="one") as first:
        with scene.member(group_instance_id="two") as second:
            before = scene.wait_shared(first, second)
        hands.asked_for.clear()
        with scene.member(group_instance_id="two") as again:
            assert scene.wait_shared(first, again) == before
    assert hands.asked_for == []


def test_of_two_members_with_one_instance_id_the_first_is_fenced(broker: EmbeddedBroker) -> None:
    """It ends with one sentence, and its partitions are lost to it."""
    scene, hands = Scene(broker.bootstrap, "range"), Hands()
    with scene.member(hands, group_instance_id="one") as first:
        scene.wait_shared(first)
        with scene.member(group_instance_id="one") as second:
            wait_until(lambda: bool(hands.was_lost), "the loss")
            with pytest.raises(Fenced, match=r"has taken over group\.instance\.id 'one'"):
                first.raise_fatal()
            scene.wait_shared(second)


@pytest.mark.parametrize("protocol", ["range", *BOTH])
def test_new_partitions_are_shared_out(broker: EmbeddedBroker, protocol: str) -> None:
    """Somebody must notice them: the leader, or the broker."""
    scene = Scene(broker.bootstrap, protocol, partitions=1)
    with scene.member() as first:
        scene.wait_shared(first)
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_partitions(scene.topic, 3)
        scene.partitions = 3
        scene.wait_shared(first)


@pytest.mark.parametrize("protocol", ["range", *BOTH])
def test_a_heartbeat_on_demand_tells_whether_the_group_still_has_the_member(
    broker: EmbeddedBroker, protocol: str
) -> None:
    """True for a member, also while others join; False for one that was removed or gets no answer."""
    scene = Scene(broker.bootstrap, protocol)
    config = parse_config(scene.settings)
    with scene.member() as member, Cluster(config.client) as cluster:
        scene.wait_shared(member)
        assert member.confirm(cluster, 5_000)
        api = Api.CONSUMER_GROUP_HEARTBEAT if protocol == "consumer" else Api.HEARTBEAT
        code = ErrorCode.fenced_member_epoch if protocol == "consumer" else ErrorCode.illegal_generation
        broker.faults.inject(api, Error(code), times=2, when=lambda request: request.group_id == scene.group)
        assert not member.confirm(cluster, 5_000)
    broker.faults.clear()


def test_a_session_timeout_that_the_broker_does_not_allow_ends_the_membership(broker: EmbeddedBroker) -> None:
    """The broker's refusal is the user's to read, not to be retried for ever."""
    scene = Scene(broker.bootstrap, "range")
    with scene.member(session_timeout_ms=200, heartbeat_interval_ms=50) as member:

        def is_refused() -> bool:
            try:
                member.raise_fatal()
            except KafkaError as error:
                return error.code is ErrorCode.invalid_session_timeout
            return False

        wait_until(is_refused, "the refusal")


def test_an_error_that_nobody_thought_of_reaches_the_users_thread(broker: EmbeddedBroker) -> None:
    """Without it the partitions would go to others while this one believes in them."""
    scene = Scene(broker.bootstrap, "range")

    class Broken(Hands):
        def may_release(self, partitions: frozenset[TopicPartition]) -> bool:
            raise ZeroDivisionError

    hands = Broken()
    with scene.member(hands) as first:
        scene.wait_shared(first)
        with scene.member() as second:
            wait_until(lambda: bool(hands.was_lost), "the loss")
            with pytest.raises(SemelError, match="ZeroDivisionError"):
                first.raise_fatal()
            scene.wait_shared(second)


def test_settings_of_groups_that_contradict_each_other_are_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=r"heartbeat.interval.ms=2000 leaves no second chance"):
        parse_config({"bootstrap": "b:1", "session.timeout.ms": 3_000, "heartbeat.interval.ms": 2_000})
    with pytest.raises(ConfigError, match=r"'nonsense' is not supported: write one or several of range"):
        parse_config({"bootstrap": "b:1", "partition.assignment.strategy": "range,nonsense"})


@pytest.mark.parametrize("protocol", ["range", "roundrobin", *BOTH])
@pytest.mark.parametrize("leader", ["semel", "librdkafka"])
def test_semel_and_librdkafka_share_a_group(broker: EmbeddedBroker, protocol: str, leader: str) -> None:
    """Whoever leads: the formats of both are understood by the other, and every partition has one reader."""
    scene = Scene(broker.bootstrap, protocol)
    config = {"bootstrap.servers": broker.bootstrap, "group.id": scene.group, "enable.auto.commit": False}
    if protocol == "consumer":
        config["group.protocol"] = "consumer"
    else:
        config |= {"session.timeout.ms": 3_000, "heartbeat.interval.ms": 100, "partition.assignment.strategy": protocol}
    other = confluent_kafka.Consumer(config)
    other.subscribe([scene.topic])

    def theirs() -> set[int]:
        other.poll(0.02)
        return {one.partition for one in other.assignment()}

    try:
        if leader == "librdkafka":
            wait_until(lambda: theirs() == {0, 1, 2, 3}, "librdkafka alone")
        with scene.member() as member:

            def ours() -> set[int]:
                member.raise_fatal()
                return {partition.partition for partition in member.tenures}

            if leader == "semel":
                wait_until(lambda: ours() == {0, 1, 2, 3} or bool(theirs()), "the first member")

            def is_shared() -> bool:
                mine, others = ours(), theirs()
                return sorted([*mine, *others]) == [0, 1, 2, 3] and len(mine) == len(others)

            wait_until(is_shared, "two partitions for each")
        wait_until(lambda: theirs() == {0, 1, 2, 3}, "librdkafka alone again")
    finally:
        other.close()
