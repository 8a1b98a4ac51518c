"""The fetcher against a scripted cluster: what it asks for, and what it does about each kind of trouble."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from partition_log import PartitionLog, random_log

from semel.client.cluster import Cluster, Leader
from semel.client.config import ClientConfig, FetchConfig
from semel.client.connection import Pending
from semel.client.fetcher import Fetcher, find_marker
from semel.errors import (
    BrokerUnreachable,
    ConfigError,
    ConnectionLost,
    CorruptRecords,
    InvalidState,
    KafkaError,
    OffsetOutOfRange,
    RequestTimedOut,
    SemelError,
)
from semel.records import read_header
from semel.wire import Api, ErrorCode, build

LEADER, FOLLOWER = 1, 2
BASE_TIME_S = 100.0

Fault = ErrorCode | SemelError | Callable[[bytes], bytes]
"""What the next answer about a partition is instead of its records, or what is done to their bytes."""


@dataclass
class ScriptedCluster(Cluster):
    """Answers Fetch and ListOffsets from logs in memory; time passes only when somebody waits."""

    logs: Mapping[int, PartitionLog]
    faults: dict[int, list[Fault]] = field(default_factory=dict)
    preferred_replica: int = -1
    bytes_always: bool = True
    """Whether one whole batch is sent even if it is over the limit, as brokers do for the first partition."""
    now: float = BASE_TIME_S
    requests: list[tuple[int, Any]] = field(default_factory=list)
    refreshes: int = 0
    leader_node: int = LEADER
    is_holding: bool = False
    """Answers are ready and do not arrive."""
    held: list[tuple[Pending, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(
            ClientConfig(bootstrap=(("127.0.0.1", 1),), api_timeout_ms=10_000),
            clock=lambda: self.now,
            sleep=self.pass_time,
        )

    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    def leader(self, topic: str, partition: int) -> Leader:
        return Leader(self.leader_node, 0)

    def forget_leaders(self, topics: Any = None) -> None:
        self.refreshes += 1

    def submit(
        self, node: int, api: Api, *, highest: int | None = None, timeout_ms: int | None = None, **fields: Any
    ) -> Pending:
        pending = Pending(build(api, 12 if api is Api.FETCH else 7, **fields), 0, self.now + 30)
        self.requests.append((node, pending.request))
        request = cast(Any, pending.request)
        if api is Api.LIST_OFFSETS:
            pending.response = self._list_offsets(request)
            return pending
        answers = [self._answer(node, asked, request.isolation_level) for asked in request.topics[0].partitions]
        lost = [answer for answer in answers if isinstance(answer, SemelError)]
        if lost:
            pending.error = lost[0]
        else:
            topic = SimpleNamespace(topic=request.topics[0].topic, partitions=answers)
            response = SimpleNamespace(error_code=ErrorCode.none, responses=[topic])
            if self.is_holding:
                self.held.append((pending, response))
                return pending
            pending.response = response
        self.now += 0.001 if any(getattr(a, "records", b"") for a in answers) else request.max_wait.total_seconds()
        return pending

    def release(self) -> None:
        """Everything that was held arrives at once."""
        self.is_holding = False
        for pending, response in self.held:
            pending.response = response

    def wait_any(self, pendings: Any, *, timeout_ms: float | None = None) -> bool:
        return any(pending.done for pending in pendings)

    def _answer(self, node: int, asked: Any, isolation_level: int) -> Any:
        log = self.logs[asked.partition]
        waiting = self.faults.get(asked.partition, [])
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, SemelError):
            return fault
        answer = SimpleNamespace(
            partition_index=asked.partition,
            error_code=ErrorCode.none,
            high_watermark=log.end_offset,
            last_stable_offset=log.last_stable_offset,
            log_start_offset=0,
            aborted_transactions=None,
            preferred_read_replica=self.preferred_replica if node == LEADER else -1,
            records=None,
        )
        if isinstance(fault, ErrorCode):
            answer.error_code = fault
        elif answer.preferred_read_replica < 0:
            data, aborted = log.serve(
                asked.fetch_offset, asked.partition_max_bytes, read_committed=isolation_level == 1
            )
            data = data if self.bytes_always else data[: asked.partition_max_bytes]
            answer.records = fault(data) if fault else data
            answer.aborted_transactions = aborted
        return answer

    def _list_offsets(self, request: Any) -> Any:
        def listed(asked: Any) -> Any:
            log = self.logs[asked.partition_index]
            latest = log.last_stable_offset if request.isolation_level else log.end_offset
            offset = latest if asked.timestamp == -1 else 0
            return SimpleNamespace(
                partition_index=asked.partition_index, error_code=ErrorCode.none, offset=offset, timestamp=-1
            )

        topics = [SimpleNamespace(name=t.name, partitions=[listed(p) for p in t.partitions]) for t in request.topics]
        return SimpleNamespace(topics=topics)


def settled_log(seed: int, steps: int = 60) -> PartitionLog:
    """A log without open transactions and with something to see, by a kept seed."""
    while True:
        log = random_log(random.Random(seed), steps)
        if log.last_stable_offset == log.end_offset and log.visible(0, log.end_offset, read_committed=True):
            return log
        seed += 1


def read_everything(
    cluster: ScriptedCluster, config: FetchConfig | None = None, *, prefetch: bool = True
) -> dict[int, list[tuple[int, bytes]]]:
    fetcher = Fetcher(cluster, config, prefetch=prefetch)
    fetcher.assign({("t", partition): "earliest" for partition in cluster.logs})
    found: dict[int, list[tuple[int, bytes]]] = {partition: [] for partition in cluster.logs}
    for table in fetcher.read_until(fetcher.end_offsets()):
        for row in table.select(["partition", "offset", "value"]).to_pylist():
            found[row["partition"]].append((row["offset"], row["value"]))
    return found


def expected(cluster: ScriptedCluster) -> dict[int, list[tuple[int, bytes]]]:
    return {partition: log.visible(0, log.end_offset, read_committed=True) for partition, log in cluster.logs.items()}


def damage(data: bytes) -> bytes:
    """Flip a bit that only the checksum of the first batch shows."""
    end = read_header(data).total_bytes
    return data[: end - 1] + bytes([data[end - 1] ^ 1]) + data[end:]


def fetch_often(fetcher: Fetcher, offsets: list[int] | None = None) -> None:
    """Call fetch() until it raises, which it must at some time."""
    for _ in range(100):
        for records in fetcher.fetch(timeout_ms=500):
            if offsets is not None:
                offsets += records.table["offset"].to_pylist()


TROUBLES: Mapping[str, list[Fault]] = {
    "none": [],
    "the leader moved": [ErrorCode.not_leader_or_follower],
    "an election": [ErrorCode.leader_not_available, ErrorCode.leader_not_available],
    "a stale epoch": [ErrorCode.fenced_leader_epoch],
    "a lost connection": [ConnectionLost("gone")],
    "a slow broker": [RequestTimedOut("late")],
    "a refused connection": [BrokerUnreachable("no")],
    "damage on the way": [damage],
}


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_trouble_that_passes_loses_and_repeats_nothing(trouble: list[Fault], prefetch: bool) -> None:
    """After each kind of passing trouble in one partition, both partitions are read in full and once."""
    cluster = ScriptedCluster({0: settled_log(1), 1: settled_log(500)}, {0: list(trouble)})

    assert read_everything(cluster, FetchConfig(partition_bytes_max=300), prefetch=prefetch) == expected(cluster)
    assert cluster.now < BASE_TIME_S + 5


def test_old_and_new_leader_answering_together_do_not_repeat_records() -> None:
    """A leader that answers late is still under way when its successor is asked; both have the records."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log}, is_holding=True)
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 0})
    assert fetcher.fetch(timeout_ms=0) == []
    cluster.leader_node = FOLLOWER
    assert fetcher.fetch(timeout_ms=0) == []
    cluster.release()

    fetched = [records for _ in range(3) for records in fetcher.fetch(timeout_ms=0)]

    assert [node for node, _ in cluster.requests][:2] == [LEADER, FOLLOWER]
    assert [offset for records in fetched for offset in records.table["offset"].to_pylist()] == [
        offset for offset, _ in log.visible(0, log.end_offset, read_committed=True)
    ]


def test_the_next_request_is_under_way_before_the_records_are_handed_out() -> None:
    """With prefetch the broker works while the caller does; the position is that of the records handed out."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log})
    fetcher = Fetcher(cluster, FetchConfig(partition_bytes_max=300), prefetch=True)
    fetcher.assign({("t", 0): 0})

    [records] = fetcher.fetch()

    assert [r.topics[0].partitions[0].fetch_offset for _, r in cluster.requests] == [0, records.next_offset]
    assert fetcher.positions == {("t", 0): records.next_offset}


def test_a_moved_leader_is_looked_up_anew() -> None:
    """The table says what to refresh, and it is done."""
    cluster = ScriptedCluster({0: settled_log(1)}, {0: [ErrorCode.not_leader_or_follower]})

    read_everything(cluster)

    assert cluster.refreshes == 1


def test_a_connection_that_stays_lost_is_an_error_after_the_api_timeout() -> None:
    """Retries end with the last error once default.api.timeout.ms has passed, over several calls."""
    cluster = ScriptedCluster({0: settled_log(1)}, {0: [ConnectionLost("gone")] * 1000})
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 0})

    with pytest.raises(ConnectionLost, match="gone"):
        fetch_often(fetcher)

    assert 10 <= cluster.now - BASE_TIME_S <= 12


def test_damage_that_stays_is_an_error_with_its_place() -> None:
    """What lies before the damaged batch is handed out; the damaged one is read twice and then named."""
    log = settled_log(1)
    last_record = log.records[-1].offset
    [base] = [first for first, last, _ in log.batches if first <= last_record <= last]
    log.batches = [(first, last, damage(data) if first == base else data) for first, last, data in log.batches]
    cluster = ScriptedCluster({0: log})
    fetcher = Fetcher(cluster, FetchConfig(isolation="read_uncommitted"))
    fetcher.assign({("t", 0): 0})
    offsets: list[int] = []

    with pytest.raises(CorruptRecords, match=f"'t' partition 0 cannot be read at offset {base}"):
        fetch_often(fetcher, offsets)

    assert offsets == [offset for offset, _ in log.visible(0, base, read_committed=False)]
    assert fetcher.positions == {("t", 0): base}
    asked_there = [r for _, r in cluster.requests if r.topics[0].partitions[0].fetch_offset == base]
    assert len(asked_there) == 2


def test_a_batch_larger_than_the_limit_is_asked_for_with_more() -> None:
    """A broker that cuts even the first batch is asked for twice as much until a whole batch fits."""
    cluster = ScriptedCluster({0: settled_log(1)}, bytes_always=False)

    assert read_everything(cluster, FetchConfig(partition_bytes_max=16)) == expected(cluster)


def test_a_position_outside_of_the_log_is_an_error_by_default() -> None:
    """No silent jump: what was deleted unread must be known."""
    cluster = ScriptedCluster({0: settled_log(1)}, {0: [ErrorCode.offset_out_of_range]})
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 5})

    with pytest.raises(OffsetOutOfRange, match=r"'t' partition 0 \(offset 5\)"):
        fetcher.fetch()

    assert fetcher.positions == {("t", 0): 5}


def test_a_position_outside_of_the_log_is_reset_where_that_is_asked_for() -> None:
    """auto.offset.reset=earliest goes on at the beginning."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log}, {0: [ErrorCode.offset_out_of_range]})
    fetcher = Fetcher(cluster, FetchConfig(auto_offset_reset="earliest"))
    fetcher.assign({("t", 0): 5})

    [records] = fetcher.fetch()

    assert records.table["offset"].to_pylist() == [offset for offset, _ in log.visible(0, 10**9, read_committed=True)]


def test_an_error_in_one_partition_comes_after_the_records_of_the_others() -> None:
    """Records that came beside an error are handed out first, and the error is not forgotten."""
    cluster = ScriptedCluster({0: settled_log(1), 1: settled_log(500)}, {0: [ErrorCode.topic_authorization_failed]})
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 0, ("t", 1): 0})

    assert [records.partition for records in fetcher.fetch()] == [1]
    with pytest.raises(KafkaError, match="may not use"):
        fetcher.fetch()


def test_a_replica_in_the_same_rack_is_read_where_the_leader_names_one() -> None:
    """KIP-392: the leader only points, the records come from the follower."""
    cluster = ScriptedCluster({0: settled_log(1)}, preferred_replica=FOLLOWER)

    assert read_everything(cluster, FetchConfig(client_rack="a")) == expected(cluster)

    fetches = [node for node, request in cluster.requests if request.__api_key__ == Api.FETCH]
    assert fetches[0] == LEADER
    assert set(fetches[1:]) == {FOLLOWER}


def test_a_lagging_replica_sends_the_reader_back_to_the_leader() -> None:
    """A follower's "out of range" is no reason to give up or to reset."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log}, {0: [lambda data: data, ErrorCode.offset_out_of_range]}, FOLLOWER)
    fetcher = Fetcher(cluster, FetchConfig(client_rack="a"))
    fetcher.assign({("t", 0): 0})

    fetched = fetcher.fetch(timeout_ms=5_000)

    assert fetched[0].next_offset == log.end_offset
    assert [node for node, _ in cluster.requests][:3] == [LEADER, FOLLOWER, LEADER]


@pytest.mark.parametrize("target", [0, 1, 17, 40])
def test_seek_drops_what_was_asked_for_before(target: int) -> None:
    """After a seek only the new position counts, whatever is still under way from the old one."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log})
    fetcher = Fetcher(cluster, FetchConfig(partition_bytes_max=300), prefetch=True)
    fetcher.assign({("t", 0): 0})
    fetcher.fetch()

    fetcher.seek("t", 0, target)

    rows = [row for table in fetcher.read_until({("t", 0): log.end_offset}) for row in table.to_pylist()]
    assert [(row["offset"], row["value"]) for row in rows] == log.visible(target, log.end_offset, read_committed=True)


def test_an_end_that_cannot_be_reached_says_what_is_in_the_way() -> None:
    """An end beyond the last stable offset stalls with positions and a reason, not for ever."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log})
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 0})

    with pytest.raises(RequestTimedOut, match=f"at offset {log.end_offset} on the way to {log.end_offset + 1}"):
        list(fetcher.read_until({("t", 0): log.end_offset + 1}, stall_ms=1_000))


def test_only_the_named_partitions_are_read_until_their_ends() -> None:
    """read_until leaves the other assigned partitions where they are."""
    cluster = ScriptedCluster({0: settled_log(1), 1: settled_log(500)})
    fetcher = Fetcher(cluster)
    fetcher.assign({("t", 0): 0, ("t", 1): 0})

    tables = list(fetcher.read_until({("t", 1): 7}))

    assert fetcher.positions == {("t", 0): 0, ("t", 1): 7}
    assert [row["offset"] for table in tables for row in table.to_pylist()] == [
        offset for offset, _ in cluster.logs[1].visible(0, 7, read_committed=True)
    ]


def test_partitions_that_were_served_go_to_the_back_of_the_line() -> None:
    """Brokers fill a response in the order of the request, so the order has to turn."""
    cluster = ScriptedCluster({number: settled_log(number) for number in range(3)})
    cluster.faults = {1: [ErrorCode.offset_not_available]}
    fetcher = Fetcher(cluster, FetchConfig(partition_bytes_max=100))
    fetcher.assign({("t", number): 0 for number in range(3)})
    fetcher.fetch()
    cluster.now += 1

    fetcher.fetch()

    assert [asked.partition for asked in cluster.requests[-1][1].topics[0].partitions] == [1, 0, 2]


@pytest.mark.parametrize("position", [-1, "newest", None, 1.5])
def test_a_position_that_is_none_is_refused(position: Any) -> None:
    """A typing error must not become an offset."""
    with pytest.raises(ConfigError, match="no position"):
        Fetcher(ScriptedCluster({0: PartitionLog()})).assign({("t", 0): position})


def test_a_partition_that_is_not_assigned_cannot_be_moved() -> None:
    """seek() on something else is a mistake, not an assignment."""
    with pytest.raises(InvalidState, match="not assigned"):
        Fetcher(ScriptedCluster({0: PartitionLog()})).seek("t", 0, 5)


def test_the_marker_of_a_transaction_is_found_among_others() -> None:
    """find_marker returns the first marker of that producer from the offset on."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log})
    for transaction in log.transactions:
        found = find_marker(cluster, "t", 0, transaction.producer_id, transaction.first_offset, timeout_ms=1_000)

        assert found is not None
        assert (found.kind, found.offset) == (transaction.outcome, transaction.marker_offset)


def test_a_marker_that_does_not_come_is_none_after_the_time_given() -> None:
    """find_marker waits, and no longer than it was told to."""
    log = settled_log(1)
    cluster = ScriptedCluster({0: log})

    assert find_marker(cluster, "t", 0, 77, 0, timeout_ms=1_000) is None
    assert 1 <= cluster.now - BASE_TIME_S < 1.5


def test_read_uncommitted_asks_for_the_end_of_the_log() -> None:
    """The isolation level goes into both requests."""
    log = random_log(random.Random(3), 40)
    cluster = ScriptedCluster({0: log})
    fetcher = Fetcher(cluster, FetchConfig(isolation="read_uncommitted"))
    fetcher.assign({("t", 0): 0})

    rows = [row for table in fetcher.read_until(fetcher.end_offsets()) for row in table.to_pylist()]

    assert [(row["offset"], row["value"]) for row in rows] == log.visible(0, log.end_offset, read_committed=False)
    assert {request.isolation_level for _, request in cluster.requests} == {0}
