"""The group APIs from bytes to bytes: every version, every refusal, and what waits is answered."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from group_calls import Asker, counting_turns, running
from kio.schema.errors import ErrorCode

from semel.broker.acls import AclBinding, Authorizer, Operation, ResourceType
from semel.broker.durability import Fsync
from semel.wire.api import Api

SUBSCRIPTION = bytes.fromhex("0000 00000001 0001 74 ffffffff")
NOBODY = {"generation_id_or_member_epoch": -1, "member_id": ""}


async def join(asker: Asker, member_id: str = "", **fields: Any) -> Any:
    """A JoinGroup, and the second one of a client that is told its id first."""
    request: dict[str, Any] = {
        "group_id": "g",
        "session_timeout": 10_000,
        "rebalance_timeout": 60_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": SUBSCRIPTION}],
        **fields,
    }
    answer = await asker.ask(Api.JOIN_GROUP, member_id=member_id, **request)
    if answer.error_code is ErrorCode.member_id_required:
        answer = await asker.ask(Api.JOIN_GROUP, member_id=answer.member_id, **request)
    return answer


async def sync(asker: Asker, joined: Any, assignment: bytes = b"all", **fields: Any) -> Any:
    return await asker.ask(
        Api.SYNC_GROUP,
        group_id="g",
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        assignments=[{"member_id": member.member_id, "assignment": assignment} for member in joined.members],
        **fields,
    )


async def commit(asker: Asker, offset: int = 42, *, topic: str = "t", **fields: Any) -> dict[int, ErrorCode]:
    partition = {"committed_offset": offset, "committed_leader_epoch": 0, "committed_metadata": "note"}
    request: dict[str, Any] = {"group_id": "g", **NOBODY, **fields}
    answer = await asker.ask(
        Api.OFFSET_COMMIT,
        topics=[{"name": topic, "partitions": [{"partition_index": index, **partition} for index in (0, 9)]}],
        **request,
    )
    (answered,) = answer.topics
    return {partition.partition_index: partition.error_code for partition in answered.partitions}


async def fetch(asker: Asker, group_id: str = "g", **fields: Any) -> Any:
    """The answer about one partition of `t`, of whichever version."""
    topics = [{"name": "t", "partition_indexes": [0]}]
    answer = await asker.ask(
        Api.OFFSET_FETCH, group_id=group_id, topics=topics, groups=[{"group_id": group_id, "topics": topics}], **fields
    )
    (topic,) = answer.groups[0].topics if hasattr(answer, "groups") else answer.topics
    return topic.partitions[0]


@pytest.mark.parametrize("age", range(10))
def test_a_member_lives_its_life_in_every_version(tmp_path: Path, age: int) -> None:
    """Join, sync, heartbeat, commit, fetch, describe, list, leave, delete: each version reads and writes its fields."""

    async def live() -> None:
        async with running(tmp_path, age=age) as asker:
            joined = await join(asker)
            member_id = joined.member_id
            assert (joined.error_code, joined.generation_id, joined.leader) == (ErrorCode.none, 1, member_id)
            assert [member.metadata for member in joined.members] == [SUBSCRIPTION]
            synced = await sync(asker, joined, protocol_type="consumer", protocol_name="range")
            assert (synced.error_code, synced.assignment) == (ErrorCode.none, b"all")
            mine = {"group_id": "g", "member_id": member_id}
            beat = await asker.ask(Api.HEARTBEAT, generation_id=1, **mine)
            assert beat.error_code is ErrorCode.none
            codes = await commit(asker, generation_id_or_member_epoch=1, member_id=member_id)
            assert codes == {0: ErrorCode.none, 9: ErrorCode.unknown_topic_or_partition}
            fetched = await fetch(asker, require_stable=True)
            assert (fetched.committed_offset, fetched.metadata) == (42, "note")
            (described,) = (
                await asker.ask(Api.DESCRIBE_GROUPS, groups=["g"], include_authorized_operations=True)
            ).groups
            assert (described.group_state, described.protocol_data) == ("Stable", "range")
            assert [member.member_assignment for member in described.members] == [b"all"]
            assert described.members[0].client_host == "/127.0.0.1"
            listed = await asker.ask(Api.LIST_GROUPS, states_filter=["stable"], types_filter=["Classic"])
            assert [(group.group_id, group.protocol_type) for group in listed.groups] == [("g", "consumer")]
            left = await asker.ask(Api.LEAVE_GROUP, members=[{"member_id": member_id}], **mine)
            assert left.error_code is ErrorCode.none
            deleted = await asker.ask(Api.DELETE_GROUPS, groups_names=["g", "other"])
            assert [result.error_code for result in deleted.results] == [ErrorCode.none, ErrorCode.group_id_not_found]
            assert (await fetch(asker)).committed_offset == -1

    asyncio.run(live())


@pytest.mark.parametrize("age", range(10))
def test_refusals_are_told_in_every_version(tmp_path: Path, age: int) -> None:
    """A group that is not there, and what each version can say about it."""

    async def refuse() -> None:
        async with running(tmp_path, age=age) as asker:
            somebody = {"group_id": "g", "member_id": "somebody", "generation_id": 1}
            assert (await join(asker, "somebody")).error_code is ErrorCode.unknown_member_id
            assert (await join(asker, session_timeout=1)).error_code is ErrorCode.invalid_session_timeout
            assert (await join(asker, group_id="")).error_code is ErrorCode.invalid_group_id
            for api in (Api.SYNC_GROUP, Api.HEARTBEAT):
                answer = await asker.ask(api, assignments=[], **somebody)
                assert answer.error_code is ErrorCode.unknown_member_id
            left = await asker.ask(Api.LEAVE_GROUP, members=[{"member_id": "somebody"}], **somebody)
            codes = [member.error_code for member in left.members] if age >= 3 else [left.error_code]
            assert codes == [ErrorCode.unknown_member_id]
            codes = await commit(asker, generation_id_or_member_epoch=1, member_id="somebody")
            assert codes[0] is (ErrorCode.group_id_not_found if age >= 9 else ErrorCode.illegal_generation)
            (described,) = (
                await asker.ask(Api.DESCRIBE_GROUPS, groups=["g"], include_authorized_operations=False)
            ).groups
            assert described.group_state == "Dead"
            assert described.error_code is (ErrorCode.group_id_not_found if age >= 6 else ErrorCode.none)

    asyncio.run(refuse())


@pytest.mark.parametrize("age", [1, 4, 9])
def test_without_permission_nothing_is_done_or_told(tmp_path: Path, age: int) -> None:
    """Kafka's rules: READ on the group and the topic to commit, DESCRIBE to look, DELETE to delete."""

    async def ask_all() -> None:
        async with running(tmp_path, age=age) as asker:
            await commit(asker)
            asker.broker.authorizer = Authorizer()
            group_denied = ErrorCode.group_authorization_failed
            assert (await join(asker)).error_code is group_denied
            mine = {"group_id": "g", "member_id": "m", "generation_id": 1}
            for api in (Api.SYNC_GROUP, Api.HEARTBEAT, Api.LEAVE_GROUP):
                answer = await asker.ask(api, assignments=[], members=[{"member_id": "m"}], **mine)
                assert answer.error_code is group_denied
            assert await commit(asker) == {0: group_denied, 9: group_denied}
            answer = await asker.ask(
                Api.OFFSET_FETCH,
                group_id="g",
                topics=[{"name": "t", "partition_indexes": [0]}],
                groups=[{"group_id": "g", "topics": None}],
            )
            codes = {1: lambda: answer.topics[0].partitions[0], 4: lambda: answer, 9: lambda: answer.groups[0]}
            assert codes[age]().error_code is group_denied
            (described,) = (
                await asker.ask(Api.DESCRIBE_GROUPS, groups=["g"], include_authorized_operations=False)
            ).groups
            assert described.error_code is group_denied
            assert (await asker.ask(Api.LIST_GROUPS)).groups == ()
            deleted = await asker.ask(Api.DELETE_GROUPS, groups_names=["g"])
            assert deleted.results[0].error_code is group_denied
            answer = await asker.ask(Api.OFFSET_DELETE, group_id="g", topics=[])
            assert answer.error_code is group_denied

    asyncio.run(ask_all())


def test_topics_without_permission_are_refused_one_by_one(tmp_path: Path) -> None:
    """The group is allowed, the topic is not; when all offsets are asked for, the topic is left out."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            await commit(asker)
            authorizer = Authorizer()
            authorizer.add([AclBinding(ResourceType.GROUP, "g", operation=Operation.ALL)])
            asker.broker.authorizer = authorizer
            denied = ErrorCode.topic_authorization_failed
            assert await commit(asker) == {0: denied, 9: denied}
            assert (await fetch(asker)).error_code is denied
            everything = await asker.ask(Api.OFFSET_FETCH, groups=[{"group_id": "g", "topics": None}])
            assert everything.groups[0].topics == ()
            topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
            deleted = await asker.ask(Api.OFFSET_DELETE, group_id="g", topics=topics)
            assert deleted.topics[0].partitions[0].error_code is denied
            (listed,) = (await asker.ask(Api.LIST_GROUPS)).groups
            assert listed.group_id == "g"

    asyncio.run(ask_all())


def test_several_groups_are_fetched_in_one_request(tmp_path: Path) -> None:
    """OffsetFetch 8: all offsets of one, some of another, and one that nobody knows."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            await commit(asker, 1)
            await commit(asker, 2, group_id="h")
            some = [{"name": "t", "partition_indexes": [0, 1]}]
            answer = await asker.ask(
                Api.OFFSET_FETCH,
                groups=[
                    {"group_id": "g", "topics": None},
                    {"group_id": "h", "topics": some},
                    {"group_id": "i", "topics": some},
                ],
            )
            offsets = [
                [partition.committed_offset for topic in group.topics for partition in topic.partitions]
                for group in answer.groups
            ]
            assert offsets == [[1], [2, -1], [-1, -1]]

    asyncio.run(ask_all())


def test_offsets_are_deleted_unless_a_member_reads_the_topic(tmp_path: Path) -> None:
    """OffsetDelete."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            topics = [{"name": "t", "partitions": [{"partition_index": 0}]}]
            request = {"group_id": "g", "topics": topics}
            assert (await asker.ask(Api.OFFSET_DELETE, **request)).error_code is ErrorCode.group_id_not_found
            await commit(asker)
            joined = await join(asker)
            await sync(asker, joined)
            refused = await asker.ask(Api.OFFSET_DELETE, **request)
            assert refused.topics[0].partitions[0].error_code is ErrorCode.group_subscribed_to_topic
            await asker.ask(Api.LEAVE_GROUP, group_id="g", members=[{"member_id": joined.member_id}])
            deleted = await asker.ask(Api.OFFSET_DELETE, **request)
            assert deleted.topics[0].partitions[0].error_code is ErrorCode.none
            assert (await fetch(asker)).committed_offset == -1

    asyncio.run(ask_all())


def test_who_waits_is_answered_when_the_others_have_joined(tmp_path: Path) -> None:
    """A second member comes: both wait for each other, then for the leader's assignment."""

    async def meet() -> None:
        async with running(tmp_path, age=3) as asker:
            first = await join(asker)
            await sync(asker, first)
            second_join = asyncio.ensure_future(join(asker))
            await asyncio.sleep(0)
            again = await join(asker, first.member_id)
            second = await second_join
            assert (again.generation_id, second.generation_id) == (2, 2)
            assert len(again.members) == 2
            waiting = asyncio.ensure_future(sync(asker, second))
            await asyncio.sleep(0)
            assert not waiting.done()
            await sync(asker, again, b"half")
            assert (await waiting).assignment == b"half"

    asyncio.run(meet())


def test_a_member_that_falls_silent_lets_the_others_go_on(tmp_path: Path) -> None:
    """The broker's clock removes it, and whoever waits for it is answered."""

    async def wait_for_it() -> None:
        async with running(tmp_path, age=3) as asker:
            first = await join(asker)
            await sync(asker, first)
            waiting = asyncio.ensure_future(join(asker))
            await asyncio.sleep(0)
            await asker.pass_time(10_000)
            assert (await waiting).generation_id == 2

    asyncio.run(wait_for_it())


def test_a_refused_request_leaves_nothing_waiting(tmp_path: Path) -> None:
    """Each waiting request costs memory until it is answered."""

    async def refuse() -> None:
        async with running(tmp_path) as asker:
            for _ in range(3):
                await join(asker, "somebody")
                await sync(asker, await join(asker, "somebody"))
            await asyncio.sleep(0)
            assert not vars(asker.broker.groups)["_waiting"]

    asyncio.run(refuse())


def test_groups_and_offsets_outlive_a_restart(tmp_path: Path) -> None:
    """The member goes on with its generation, as if nothing had happened."""

    async def restart() -> None:
        async with running(tmp_path) as asker:
            joined = await join(asker)
            await sync(asker, joined)
            await commit(asker, 7, generation_id_or_member_epoch=1, member_id=joined.member_id)
        async with running(tmp_path) as asker:
            beat = await asker.ask(Api.HEARTBEAT, group_id="g", member_id=joined.member_id, generation_id=1)
            assert beat.error_code is ErrorCode.none
            assert (await fetch(asker)).committed_offset == 7

    asyncio.run(restart())


def test_with_fsync_always_a_commit_is_acknowledged_when_it_is_safe(tmp_path: Path) -> None:
    """And the answer is the same."""

    async def commit_safely() -> None:
        async with running(tmp_path, fsync=Fsync.ALWAYS) as asker:
            assert (await commit(asker))[0] is ErrorCode.none
            assert (await fetch(asker)).committed_offset == 42

    asyncio.run(commit_safely())


# Transactions


async def begin(asker: Asker, transactional_id: str = "x") -> dict[str, Any]:
    answer = await asker.ask(
        Api.INIT_PRODUCER_ID,
        4,
        transactional_id=transactional_id,
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    return {
        "transactional_id": transactional_id,
        "producer_id": answer.producer_id,
        "producer_epoch": answer.producer_epoch,
    }


async def txn_commit(asker: Asker, version: int, producer: dict[str, Any], **fields: Any) -> ErrorCode:
    partition = {"partition_index": 0, "committed_offset": 5, "committed_leader_epoch": -1, "committed_metadata": None}
    request: dict[str, Any] = {
        "group_id": "g",
        "topics": [{"name": "t", "partitions": [partition]}],
        **producer,
        **fields,
    }
    answer = await asker.ask(Api.TXN_OFFSET_COMMIT, version, **request)
    return answer.topics[0].partitions[0].error_code


@pytest.mark.parametrize("version", range(6))
@pytest.mark.parametrize("committed", [True, False])
def test_offsets_in_a_transaction_count_when_it_commits(tmp_path: Path, version: int, committed: bool) -> None:
    """B1 and C2 in every version; version 5 adds the group to the transaction by itself."""

    async def transact() -> None:
        async with running(tmp_path) as asker:
            await commit(asker, 1)
            producer = await begin(asker)
            if version < 5:
                added = await asker.ask(Api.ADD_OFFSETS_TO_TXN, 3, group_id="g", **producer)
                assert added.error_code is ErrorCode.none
            assert await txn_commit(asker, version, producer) is ErrorCode.none
            assert (await fetch(asker, require_stable=True)).error_code is ErrorCode.unstable_offset_commit
            assert (await fetch(asker)).committed_offset == 1
            ended = await asker.ask(Api.END_TXN, 5 if version == 5 else 3, committed=committed, **producer)
            assert ended.error_code is ErrorCode.none
            assert (await fetch(asker, require_stable=True)).committed_offset == (5 if committed else 1)

    asyncio.run(transact())


@pytest.mark.parametrize(("version", "code"), [(3, ErrorCode.invalid_txn_state), (4, ErrorCode.transaction_abortable)])
def test_offsets_of_a_group_that_was_not_added_are_refused(tmp_path: Path, version: int, code: ErrorCode) -> None:
    """A request delayed past the end of its transaction would otherwise wait for a marker that never comes."""

    async def transact() -> None:
        async with running(tmp_path) as asker:
            producer = await begin(asker)
            assert await txn_commit(asker, version, producer) is code
            assert not asker.broker.groups.coordinator.offsets.has_group("g")

    asyncio.run(transact())


def test_offsets_of_a_fenced_producer_or_member_are_refused(tmp_path: Path) -> None:
    """B4 and C1."""

    async def transact() -> None:
        async with running(tmp_path) as asker:
            old = await begin(asker)
            new = await begin(asker)
            assert await txn_commit(asker, 5, old) is ErrorCode.invalid_producer_epoch
            joined = await join(asker)
            await sync(asker, joined)
            stale = {"generation_id": 0, "member_id": joined.member_id}
            assert await txn_commit(asker, 5, new, **stale) is ErrorCode.illegal_generation
            current = {"generation_id": 1, "member_id": joined.member_id}
            assert await txn_commit(asker, 5, new, **current) is ErrorCode.none

    asyncio.run(transact())


def test_transactional_offsets_need_three_permissions(tmp_path: Path) -> None:
    """WRITE on the transactional id, READ on the group, READ on the topic."""

    async def transact() -> None:
        async with running(tmp_path) as asker:
            producer = await begin(asker)
            authorizer = asker.broker.authorizer = Authorizer()
            for resource_type, name, code_before in (
                (ResourceType.TRANSACTIONAL_ID, "x", ErrorCode.transactional_id_authorization_failed),
                (ResourceType.GROUP, "g", ErrorCode.group_authorization_failed),
                (ResourceType.TOPIC, "t", ErrorCode.topic_authorization_failed),
            ):
                assert await txn_commit(asker, 5, producer) is code_before
                authorizer.add([AclBinding(resource_type, name)])
            assert await txn_commit(asker, 5, producer) is ErrorCode.none

    asyncio.run(transact())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_long_list_of_leaving_members_is_gone_through_in_slices(tmp_path: Path, is_there: bool) -> None:
    """24,000 instance ids that nobody has held the loop for 580 ms, and for 45 ms where there is no group."""

    async def leave() -> None:
        async with running(tmp_path) as asker:
            member_ids = [(await join(asker)).member_id] if is_there else []
            turns = counting_turns(asker)
            identities = [{"member_id": "", "group_instance_id": f"none{number}"} for number in range(1_000)]
            identities += [{"member_id": member_id} for member_id in member_ids]
            left = await asker.ask(Api.LEAVE_GROUP, group_id="g", members=identities)
            codes = [member.error_code for member in left.members]
            assert codes[:1_000] == [ErrorCode.unknown_member_id] * 1_000
            assert codes[1_000:] == [ErrorCode.none] * len(member_ids)
            assert len(turns) >= 3

    asyncio.run(leave())


def test_a_member_has_only_so_many_protocols(tmp_path: Path) -> None:
    """Kafka's clients have four at most; each is looked up among those of all members, and its name is counted."""

    async def ask_all() -> None:
        async with running(tmp_path) as asker:
            many = [{"name": f"p{number}", "metadata": b""} for number in range(33)]
            assert (await join(asker, protocols=many)).error_code is ErrorCode.invalid_request
            long = [{"name": f"{number:02}" + "n" * 32_765, "metadata": b""} for number in range(32)]
            too_long = [{**one, "metadata": b"m" * 100} for one in long]
            assert (await join(asker, protocols=too_long)).error_code is ErrorCode.unknown_server_error
            codes = [
                (await join(asker, group_id=f"g{number}", protocols=long)).error_code
                for number in range(asker.broker.groups.table.bytes_max // (1 << 20) + 2)
            ]
            assert codes[0] is ErrorCode.none
            assert codes[-1] is ErrorCode.group_max_size_reached

    asyncio.run(ask_all())


def test_the_members_of_a_large_group_are_answered_some_in_each_turn(tmp_path: Path) -> None:
    """All of them in one turn made up a good part of the 700 ms for which a thousand members held the loop."""

    async def join_all() -> None:
        async with running(tmp_path) as asker:
            first = await join(asker, group_instance_id="first")
            joins = [asyncio.ensure_future(join(asker, group_instance_id=f"i{number}")) for number in range(200)]
            while (group := asker.broker.groups.coordinator.classic_group("g")) and len(group.members) < 201:
                await asyncio.sleep(0)
            identity = {"member_id": first.member_id, "group_instance_id": "first"}
            await asker.ask(Api.LEAVE_GROUP, group_id="g", members=[identity])
            done = [0]
            while done[-1] < len(joins):
                await asyncio.sleep(0)
                done.append(sum(one.done() for one in joins))
            assert max(later - now for now, later in itertools.pairwise(done)) <= 64
            assert {(await one).generation_id for one in joins} == {2}

    asyncio.run(join_all())
