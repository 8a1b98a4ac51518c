"""Committed and pending offsets: what a group finds again, rule by rule and against a slow model."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from group_world import GROUP, GroupWorld, protocols, refused
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kio.schema.errors import ErrorCode

from semel.core.classic_state import GroupState, JoinRequest, MemberIdentity
from semel.core.consumer_groups import ConsumerGroups
from semel.core.group_coordinator import Committer, GroupCoordinator
from semel.core.group_offsets import FetchedOffset, GroupOffsets, OffsetCommit
from semel.core.group_records import OffsetAndMetadata, OffsetRecord

NOBODY = Committer()
DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS


def offset_of(world: GroupWorld, topic: str = "t", partition: int = 0) -> int | None:
    value = world.coordinator.decide_fetch(GROUP, [(topic, partition)])[topic, partition].value
    return None if value is None else value.offset


# Committing and fetching


def test_a_commit_is_found_again_after_a_restart() -> None:
    """With its metadata and leader epoch."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 42, 3, "note"), OffsetCommit("t", 1, 7, metadata=None))
    world.restart()
    assert world.coordinator.decide_fetch(GROUP, None) == {
        ("t", 0): FetchedOffset(OffsetAndMetadata(42, 3, "note", world.now_ms)),
        ("t", 1): FetchedOffset(OffsetAndMetadata(7, -1, "", world.now_ms)),
    }


def test_what_was_never_committed_is_told_as_nothing() -> None:
    """For a group that is not there, too: the consumer then goes by `auto.offset.reset`."""
    assert GroupCoordinator().decide_fetch("g", [("t", 0)]) == {("t", 0): FetchedOffset()}
    assert GroupCoordinator().decide_fetch("g", None) == {}


def test_metadata_over_the_limit_refuses_its_partition_only() -> None:
    """`offset.metadata.max.bytes`."""
    world = GroupWorld(offset_metadata_max_bytes=4)
    decision = world.commit(NOBODY, OffsetCommit("t", 0, 1, metadata="12345"), OffsetCommit("t", 1, 1, metadata="1234"))
    assert decision.codes == {("t", 0): ErrorCode.offset_metadata_too_large, ("t", 1): ErrorCode.none}
    assert offset_of(world, partition=0) is None
    assert offset_of(world, partition=1) == 1


# Transactions


def test_a_transactions_offsets_count_when_it_commits() -> None:
    """And not a moment earlier."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 10))
    world.txn_commit(7, NOBODY, OffsetCommit("t", 0, 20))
    assert offset_of(world) == 10
    world.mark(7, committed=True)
    assert offset_of(world) == 20


def test_a_transactions_offsets_vanish_when_it_aborts() -> None:
    """D1: positions go back to the last committed."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 10))
    world.txn_commit(7, NOBODY, OffsetCommit("t", 0, 20))
    world.mark(7, committed=False)
    assert offset_of(world) == 10


def test_a_stable_fetch_waits_for_pending_offsets() -> None:
    """C2: the new owner must not start from a position that the open transaction is about to move."""
    world = GroupWorld()
    world.txn_commit(7, NOBODY, OffsetCommit("t", 0, 20))
    fetch = world.coordinator.decide_fetch
    unstable = FetchedOffset(code=ErrorCode.unstable_offset_commit)
    assert fetch(GROUP, [("t", 0), ("t", 1)], require_stable=True) == {("t", 0): unstable, ("t", 1): FetchedOffset()}
    assert fetch(GROUP, [("t", 0)], require_stable=False) == {("t", 0): FetchedOffset()}
    world.restart()
    assert world.coordinator.decide_fetch(GROUP, [("t", 0)], require_stable=True) == {("t", 0): unstable}
    world.mark(7, committed=True)
    assert offset_of(world) == 20


def test_a_plain_commit_after_a_transactions_wins() -> None:
    """Whenever the marker comes: the later record in the log is the newer wish."""
    world = GroupWorld()
    world.txn_commit(7, NOBODY, OffsetCommit("t", 0, 20))
    world.commit(NOBODY, OffsetCommit("t", 0, 5))
    world.mark(7, committed=True)
    assert offset_of(world) == 5
    world.restart()
    assert offset_of(world) == 5


def test_markers_of_one_partition_of_the_log_say_nothing_about_another() -> None:
    """Recovery reads partition after partition: an old marker must not end a transaction that is open elsewhere."""
    offsets = GroupOffsets()
    for group_id, log_partition in (("g", 0), ("h", 1)):
        record = OffsetRecord(group_id, "t", 0, OffsetAndMetadata(1))
        offsets.replay_offset(record, log_partition=log_partition, log_offset=0, producer_id=7)
    offsets.replay_marker(7, committed=True, log_partition=0)
    assert offsets.committed("g").keys() == {("t", 0)}
    assert not offsets.committed("h")
    assert offsets.has_pending("h")


def test_positions_of_an_open_transaction_are_told_by_producer_and_partition_of_the_log() -> None:
    """Until its marker; what others have pending is not among them."""
    offsets = GroupOffsets()
    for partition, producer_id, log_partition in ((0, 1, 5), (1, 1, 5), (2, 1, 6), (3, 2, 5)):
        record = OffsetRecord("g", "t", partition, OffsetAndMetadata(1))
        offsets.replay_offset(record, log_partition=log_partition, log_offset=0, producer_id=producer_id)
    assert offsets.pending_positions(1, 5) == {("t", 0), ("t", 1)}
    offsets.replay_marker(1, committed=True, log_partition=5)
    assert offsets.pending_positions(1, 5) == set()
    assert offsets.pending_positions(2, 5) == {("t", 3)}


# Deleting


def test_a_group_without_members_is_deleted_with_all_its_offsets() -> None:
    """Pending ones, too; nothing comes back with a restart or a late marker."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.commit(Committer(member, 1), OffsetCommit("t", 0, 1))
    world.txn_commit(7, Committer(member, 1), OffsetCommit("u", 0, 1))
    with refused(ErrorCode.non_empty_group):
        world.coordinator.decide_delete_group(GROUP)
    world.leave(MemberIdentity(member))
    world.carry_out(world.coordinator.decide_delete_group(GROUP))
    world.mark(7, committed=True)
    for _ in range(2):
        assert world.coordinator.listed_groups() == []
        world.restart()
    with refused(ErrorCode.group_id_not_found):
        world.coordinator.decide_delete_group(GROUP)


def test_offsets_of_a_topic_that_members_read_are_not_deleted() -> None:
    """OffsetDelete: GROUP_SUBSCRIBED_TO_TOPIC for those, success for the rest."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.commit(Committer(member, 1), OffsetCommit("t", 0, 1), OffsetCommit("u", 0, 1))
    decision = world.coordinator.decide_delete_offsets(GROUP, [("t", 0), ("u", 0), ("u", 9)])
    assert decision.codes == {
        ("t", 0): ErrorCode.group_subscribed_to_topic,
        ("u", 0): ErrorCode.none,
        ("u", 9): ErrorCode.none,
    }
    world.carry_out(decision)
    assert (offset_of(world, "t"), offset_of(world, "u")) == (1, None)


def test_offsets_of_a_group_whose_topics_are_unknown_are_not_deleted() -> None:
    """Members of another protocol type do not tell what they read."""
    world = GroupWorld()
    member = world.joined(world.join(version=3, protocol_type="connect")).member_id
    world.sync(member, 1)
    with refused(ErrorCode.non_empty_group):
        world.coordinator.decide_delete_offsets(GROUP, [("t", 0)])
    with refused(ErrorCode.group_id_not_found):
        world.coordinator.decide_delete_offsets("other", [("t", 0)])


def test_a_deleted_topic_takes_its_offsets_along() -> None:
    """A new topic of the same name begins at its beginning; a late marker brings nothing back."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 1), OffsetCommit("u", 0, 2))
    world.txn_commit(7, NOBODY, OffsetCommit("t", 1, 1), OffsetCommit("u", 0, 3))
    for _, decision in list(world.coordinator.decide_topic_deleted("t")):
        world.carry_out(decision)
    world.mark(7, committed=True)
    assert world.coordinator.offsets.committed(GROUP).keys() == {("u", 0)}
    assert offset_of(world, "u") == 3


# Expiry


def expire(world: GroupWorld, retention_ms: int = WEEK_MS) -> None:
    for _, decision in list(world.coordinator.decide_expired(world.now_ms, retention_ms)):
        world.carry_out(decision)


def test_offsets_without_a_group_expire_a_week_after_their_commit() -> None:
    """Each by its own time; nothing is left of the group then."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 1))
    world.pass_time(DAY_MS)
    world.commit(NOBODY, OffsetCommit("t", 1, 1))
    world.pass_time(6 * DAY_MS)
    expire(world)
    assert world.coordinator.offsets.committed(GROUP).keys() == {("t", 1)}
    world.pass_time(DAY_MS)
    expire(world)
    assert world.coordinator.listed_groups() == []


def test_offsets_of_a_consumer_group_expire_a_week_after_its_last_member_left() -> None:
    """KIP-211: however old the commits are."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.commit(Committer(member, 1), OffsetCommit("t", 0, 1))
    for _ in range(2):
        world.now_ms += 30 * DAY_MS
        expire(world)
        assert offset_of(world) == 1
    world.leave(MemberIdentity(member))
    world.pass_time(WEEK_MS - 1)
    expire(world)
    world.restart()
    assert offset_of(world) == 1
    world.pass_time(1)
    expire(world)
    world.restart()
    assert offset_of(world) is None
    assert world.coordinator.classic_group(GROUP) is None


def test_offsets_of_topics_that_a_stable_group_no_longer_reads_expire() -> None:
    """Those it reads are kept."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.commit(Committer(member, 1), OffsetCommit("t", 0, 1), OffsetCommit("u", 0, 1))
    world.now_ms += WEEK_MS
    expire(world)
    assert (offset_of(world, "t"), offset_of(world, "u")) == (1, None)


def test_pending_offsets_keep_a_partition_from_expiring() -> None:
    """The transaction is about to commit a newer one."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 1))
    world.txn_commit(7, NOBODY, OffsetCommit("t", 0, 2))
    world.now_ms += WEEK_MS
    expire(world)
    assert offset_of(world) == 1


def test_a_clock_that_went_back_expires_nothing_early() -> None:
    """After a restart the time may be earlier than what the log holds."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 1))
    world.now_ms -= 400 * DAY_MS
    world.restart()
    expire(world)
    assert offset_of(world) == 1


def test_a_commit_with_a_retention_of_its_own_expires_by_that() -> None:
    """OffsetCommit 2-4."""
    world = GroupWorld()
    world.carry_out(
        world.coordinator.decide_commit(
            GROUP, NOBODY, [OffsetCommit("t", 0, 1)], now_ms=world.now_ms, retention_ms=1000, api_version=2
        )
    )
    world.restart()
    world.pass_time(999)
    expire(world)
    assert offset_of(world) == 1
    world.pass_time(1)
    expire(world)
    assert offset_of(world) is None


# KIP-848 groups


def with_consumer_group() -> GroupCoordinator:
    groups = ConsumerGroups()
    coordinator = GroupCoordinator(consumer_groups=groups)
    decision = groups.decide_heartbeat(
        "g", "m", 0, None, None, 300_000, "client", "/h", ["t"], None, None, {}, topics={}, now_ms=0
    )
    groups.replay_decision(decision)
    return coordinator


def test_members_of_a_consumer_group_commit_and_fetch_by_their_epoch() -> None:
    """OffsetCommit and OffsetFetch 9: a stale epoch is refused, by the code that the request's kind knows."""
    coordinator = with_consumer_group()
    commits = [OffsetCommit("t", 0, 1)]
    assert coordinator.decide_commit("g", Committer("m", 1), commits, now_ms=0).records
    assert coordinator.decide_fetch("g", [("t", 0)], member_id="m", member_epoch=1) == {("t", 0): FetchedOffset()}
    assert coordinator.decide_fetch("g", [("t", 0)]) == {("t", 0): FetchedOffset()}
    with refused(ErrorCode.stale_member_epoch):
        coordinator.decide_commit("g", Committer("m", 9), commits, now_ms=0)
    with refused(ErrorCode.unknown_member_id):
        coordinator.decide_commit("g", Committer("somebody", 1), commits, now_ms=0)
    with refused(ErrorCode.unsupported_version):
        coordinator.decide_commit("g", Committer("m", 1), commits, now_ms=0, api_version=8)
    with refused(ErrorCode.illegal_generation):
        coordinator.decide_txn_commit("g", Committer("m", 9), commits, now_ms=0)
    with refused(ErrorCode.stale_member_epoch):
        coordinator.decide_fetch("g", [("t", 0)], member_id="m", member_epoch=9)


def test_a_group_id_is_of_one_kind_at_a_time() -> None:
    """A classic member is refused while the other kind has members, and takes over an empty group."""
    coordinator = with_consumer_group()
    request = JoinRequest("g", 1, "", "c-1", "consumer", protocols("range"), 10_000, 10_000)
    with refused(ErrorCode.inconsistent_group_protocol):
        coordinator.decide_join(request, 0)
    leaving = coordinator.consumer_groups.decide_heartbeat(
        "g", "m", -1, None, None, -1, "client", "/h", None, None, None, {}, topics={}, now_ms=0
    )
    coordinator.consumer_groups.replay_decision(leaving)
    coordinator.apply("g", coordinator.decide_join(request, 0), log_partition=0, log_offset=0)
    assert not coordinator.consumer_groups.exists("g")
    assert [(group.group_id, group.group_type) for group in coordinator.listed_groups()] == [("g", "classic")]
    with refused(ErrorCode.group_id_not_found):
        coordinator.decide_give_up_classic("g")


def test_an_empty_classic_group_makes_room_for_the_other_kind() -> None:
    """Its offsets stay, for the new members go on from there."""
    world = GroupWorld()
    (member,) = world.grow(1)
    world.commit(Committer(member, 1), OffsetCommit("t", 0, 1))
    world.leave(MemberIdentity(member))
    for record in world.coordinator.decide_give_up_classic(GROUP):
        world.coordinator.replay(record, log_partition=0, log_offset=len(world.log))
    assert world.coordinator.decide_give_up_classic(GROUP) == ()
    assert offset_of(world) == 1


def test_a_group_that_only_has_offsets_is_listed_as_an_empty_classic_one() -> None:
    """Kafka's simple group; a member may join it, and it keeps its offsets."""
    world = GroupWorld()
    world.commit(NOBODY, OffsetCommit("t", 0, 1))
    assert [(group.state, group.protocol_type) for group in world.coordinator.listed_groups()] == [("Empty", "")]
    world.grow(1)
    assert (world.group.state, offset_of(world)) == (GroupState.STABLE, 1)


# A slow model


@dataclass
class Entry:
    """One record of the model's log: an offset, a tombstone (offset None) or a marker."""

    producer_id: int | None
    where: tuple[str, int] | None = None
    offset: int | None = None
    committed: bool | None = None


class OffsetHistories(RuleBasedStateMachine):
    """The model reads its whole log again for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()
        self.entries: list[Entry] = []
        self.next_offset = 0

    def settled(self) -> tuple[dict[tuple[str, int], int], set[tuple[str, int]]]:
        """Committed offsets by position of their record in the log, and partitions with pending ones."""
        best: dict[tuple[str, int], tuple[int, int]] = {}
        pending: dict[tuple[int, tuple[str, int]], tuple[int, int]] = {}
        for position, entry in enumerate(self.entries):
            if entry.committed is not None:
                for producer_id, where in [key for key in pending if key[0] == entry.producer_id]:
                    candidate = pending.pop((producer_id, where))
                    if entry.committed:
                        best[where] = max(best.get(where, candidate), candidate)
                continue
            assert entry.where is not None
            if entry.offset is None:
                best.pop(entry.where, None)
                pending = {key: value for key, value in pending.items() if key[1] != entry.where}
            elif entry.producer_id is None:
                best[entry.where] = (position, entry.offset)
            else:
                pending[entry.producer_id, entry.where] = (position, entry.offset)
        return {where: offset for where, (_, offset) in best.items()}, {where for _, where in pending}

    @rule(
        producer_id=st.sampled_from([None, None, 1, 2]),
        partitions=st.sets(st.tuples(st.sampled_from("tu"), st.integers(0, 1)), min_size=1),
        fails=st.booleans(),
    )
    def commit(self, producer_id: int | None, partitions: set[tuple[str, int]], fails: bool) -> None:
        self.next_offset += 1
        commits = [OffsetCommit(*where, self.next_offset) for where in sorted(partitions)]
        before = copy.deepcopy(vars(self.world.coordinator.offsets)) if fails else None
        self.world.disk_is_full = fails
        if producer_id is None:
            self.world.commit(NOBODY, *commits)
        else:
            self.world.txn_commit(producer_id, NOBODY, *commits)
        self.world.disk_is_full = False
        if fails:
            assert vars(self.world.coordinator.offsets) == before, "deciding has changed something"
        else:
            self.entries += [Entry(producer_id, where, self.next_offset) for where in sorted(partitions)]

    @rule(producer_id=st.sampled_from([1, 2]), committed=st.booleans())
    def end_transaction(self, producer_id: int, committed: bool) -> None:
        self.world.mark(producer_id, committed=committed)
        self.entries.append(Entry(producer_id, committed=committed))

    @rule(topic=st.sampled_from("tu"))
    def delete_topic(self, topic: str) -> None:
        for _, decision in list(self.world.coordinator.decide_topic_deleted(topic)):
            for record in decision.records:
                assert isinstance(record, OffsetRecord)
                self.entries.append(Entry(None, (record.topic, record.partition)))
            self.world.carry_out(decision)
        settled, pending = self.settled()
        assert topic not in {where[0] for where in settled} | {where[0] for where in pending}

    @rule()
    def delete_group(self) -> None:
        if self.settled() == ({}, set()):
            with refused(ErrorCode.group_id_not_found):
                self.world.coordinator.decide_delete_group(GROUP)
            return
        decision = self.world.coordinator.decide_delete_group(GROUP)
        for record in decision.records:
            if isinstance(record, OffsetRecord):
                self.entries.append(Entry(None, (record.topic, record.partition)))
            else:
                self.entries.append(Entry(-1, committed=False))
        self.world.carry_out(decision)
        assert self.settled() == ({}, set())

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def agrees_with_the_model(self) -> None:
        settled, pending = self.settled()
        coordinator = self.world.coordinator
        everything = coordinator.decide_fetch(GROUP, None)
        assert {where: fetched.value and fetched.value.offset for where, fetched in everything.items()} == settled
        asked = [(topic, partition) for topic in "tu" for partition in (0, 1)]
        stable = coordinator.decide_fetch(GROUP, asked, require_stable=True)
        assert {where for where, fetched in stable.items() if fetched.code is not ErrorCode.none} == pending
        assert coordinator.offsets.has_group(GROUP) == bool(settled or pending)
        assert coordinator.offsets.has_pending(GROUP) == bool(pending)


TestOffsetHistories = OffsetHistories.TestCase
