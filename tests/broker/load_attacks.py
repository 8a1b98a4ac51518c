"""Clients that load a broker on purpose, each kind a function. Run as a program, so that they share no interpreter with
the client that is measured beside them: `load_attacks.py NAME HOST:PORT METRICS_PAGE`.

Each sends what it has and returns when the broker has answered, closed the connections or taken no more for a while.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from semel.records import reference
from semel.records.compression import compress
from semel.records.layout import HEADER_BYTES, LENGTH_FIELD_END, read_header, write_header
from semel.verify.hostile_sockets import ask, read_frame
from semel.verify.simulated_network import make_request
from semel.wire.api import Api
from semel.wire.messages import encode_request

Address = tuple[str, int]
PATIENCE_S = 60.0
REGEXES = (
    "(" + "|" * 4_000 + "){1900}x",
    "[" + "".join(chr(0x4E00 + 2 * number) for number in range(9_000)) + "a]{1900}",
    "(a|a)*" * 300 + "b",
    "(a?){900}a{900}",
    "((a*)*|b)*" * 180,
    "(?i)[" + "xyz" * 3_000 + "]{1900}",
)
USER, PASSWORD = "ann", "secret"


def frame_of(api: Api, version: int, client_id: str = "load", /, **fields: Any) -> bytes:
    return b"".join(encode_request(make_request(api, version, fields), 1, client_id))


class Crowd:
    """Connections of one attacker. What the broker refuses or closes is counted, and not an error of the attacker."""

    def __init__(self, address: Address, page: str = "") -> None:
        """`page` is where the broker's metrics are."""
        self._address = address
        self.page = page
        self.open: list[socket.socket] = []
        self.closed = 0

    def connect(self) -> socket.socket:
        client = socket.create_connection(self._address, timeout=PATIENCE_S)
        self.open.append(client)
        return client

    def push(self, data: bytes, clients: Iterable[socket.socket] | None = None, seconds: float = 20.0) -> None:
        """Send to all as far as the broker takes it; read nothing. Ends when nothing has moved for a second."""
        left = {client: memoryview(data) for client in (self.open if clients is None else clients)}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for client in left:
                client.setblocking(False)
                selector.register(client, selectors.EVENT_WRITE)
            while left and time.monotonic() < deadline and (ready := selector.select(1.0)):
                for key, _ in ready:
                    client: Any = key.fileobj
                    if self._send_some(client, left):
                        selector.unregister(client)

    def _send_some(self, client: socket.socket, left: dict[socket.socket, memoryview]) -> bool:
        """Whether all has been sent, or the broker has closed the connection."""
        try:
            left[client] = left[client][client.send(left[client][: 1 << 20]) :]
        except BlockingIOError:
            return False
        except OSError:
            self.closed += 1
            left[client] = memoryview(b"")
        if left[client]:
            return False
        del left[client]
        return True

    def answers(self, client: socket.socket, count: int) -> list[bytes]:
        """Up to `count` answers; fewer when the broker ends the connection."""
        client.settimeout(PATIENCE_S)
        found: list[bytes] = []
        try:
            while len(found) < count and (frame := read_frame(client)) is not None:
                found.append(frame)
        except OSError:
            self.closed += 1
        return found


# Regular expressions.


def regex_list_transactions(crowd: Crowd) -> None:
    client = crowd.connect()
    for number in range(20):
        ask(client, Api.INIT_PRODUCER_ID, 1, transactional_id=f"{'a' * 200}{number}", transaction_timeout=60_000)
    for pattern in REGEXES:
        filters = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}
        ask(client, Api.LIST_TRANSACTIONS, 2, **filters, transactional_id_pattern=pattern)


def regex_group(crowd: Crowd) -> None:
    client = crowd.connect()
    names = [{"name": f"{'a' * 200}{number}"} for number in range(20)]
    ask(client, Api.METADATA, 4, topics=names, allow_auto_topic_creation=True)
    for number, pattern in enumerate(REGEXES * 2):
        heartbeat(client, f"regex-{number % 3}", f"member-{number}", subscribed_topic_regex=pattern)


def heartbeat(client: socket.socket, group: str, member: str, **fields: Any) -> Any:
    usual = {
        "group_id": group,
        "member_id": member,
        "member_epoch": 0,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 10_000,
        "subscribed_topic_names": None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [],
    }
    return ask(client, Api.CONSUMER_GROUP_HEARTBEAT, 1, **{**usual, **fields})


# Memory.


def waiting_fetches(crowd: Crowd) -> None:
    """Twenty readers of one topic that want more than there is: each answer found so far is 50 MB."""
    client = crowd.connect()
    ask(client, Api.METADATA, 4, topics=[{"name": "large"}], allow_auto_topic_creation=True)
    batch = reference.encode_batch([reference.Record(0, 0, None, bytes(1_000_000))])
    data = [{"name": "large", "partition_data": [{"index": 0, "records": batch}]}]
    for _ in range(56):
        ask(client, Api.PRODUCE, 3, transactional_id=None, acks=1, timeout=1000, topic_data=data)
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 2**31 - 1}
    fetch = {"replica_id": -1, "max_wait": 2**31 - 1, "min_bytes": 2**31 - 1, "max_bytes": 2**31 - 1}
    for _ in range(20):
        reader = crowd.connect()
        reader.sendall(
            frame_of(Api.FETCH, 4, **fetch, isolation_level=0, topics=[{"topic": "large", "partitions": [part]}])
        )
    time.sleep(3)


def many_small_fetches(crowd: Crowd) -> None:
    """300 readers wait with a request of 8,000 partitions each, none of which is there."""
    parts = [
        {"partition": index, "fetch_offset": 0, "partition_max_bytes": 1, "log_start_offset": 0}
        for index in range(8_000)
    ]
    fetch = {"replica_id": -1, "max_wait": 2**31 - 1, "min_bytes": 2**31 - 1, "max_bytes": 1, "isolation_level": 0}
    frame = frame_of(
        Api.FETCH,
        7,
        **fetch,
        session_id=0,
        session_epoch=0,
        topics=[{"topic": "none", "partitions": parts}],
        forgotten_topics_data=[],
    )
    for _ in range(60):
        crowd.connect()
    crowd.push(frame)
    time.sleep(2)


def before_login(crowd: Crowd) -> None:
    for _ in range(1_500):
        crowd.connect()
    crowd.push(struct.pack(">i", 524_288) + bytes(524_200))


def half_frames(crowd: Crowd) -> None:
    """Forty connections with 95 of 100 MB each."""
    for _ in range(40):
        crowd.connect()
    crowd.push(struct.pack(">i", 104_857_600) + bytes(95 << 20), seconds=30.0)


def long_names(crowd: Crowd) -> None:
    """Names of a megabyte, each a new one, in a request that needs no right."""
    client = crowd.connect()
    for number in range(300):
        name = f"{number}-" + "n" * 1_000_000
        frame = frame_of(
            Api.METADATA,
            9,
            topics=[{"name": name}],
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        )
        client.sendall(frame)
        if not crowd.answers(client, 1):
            client = crowd.connect()


def long_sessions(crowd: Crowd) -> None:
    """Fetch sessions of topics whose names are a megabyte."""
    part = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1, "log_start_offset": 0}
    fetch = {"replica_id": -1, "max_wait": 0, "min_bytes": 0, "max_bytes": 1, "isolation_level": 0, "rack_id": ""}
    client = crowd.connect()
    for number in range(600):
        topics = [{"topic": f"{number}-" + "n" * 1_000_000, "partitions": [part]}]
        client.sendall(
            frame_of(Api.FETCH, 12, **fetch, session_id=0, session_epoch=0, topics=topics, forgotten_topics_data=[])
        )
        if not crowd.answers(client, 1):
            client = crowd.connect()


def pending_members(crowd: Crowd) -> None:
    """Members that ask for an id and never use it, in groups with long names, from clients with long names."""
    client = crowd.connect()
    for number in range(2_000):
        protocols = [{"name": "range", "metadata": b""}]
        fields = {
            "group_id": f"{number}-" + "g" * 200_000,
            "session_timeout": 1_800_000,
            "rebalance_timeout": 1_800_000,
            "member_id": "",
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": protocols,
            "reason": None,
        }
        client.sendall(frame_of(Api.JOIN_GROUP, 8, "c" * 30_000, **fields))
        if not crowd.answers(client, 1):
            client = crowd.connect()


def large_members(crowd: Crowd) -> None:
    """Groups without end, each with a member whose metadata is a megabyte."""
    client = crowd.connect()
    for number in range(600):
        fields = {
            "group_id": f"large-{number}",
            "session_timeout": 1_800_000,
            "rebalance_timeout": 1_800_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": bytes(1_000_000)}],
        }
        client.sendall(frame_of(Api.JOIN_GROUP, 1, **fields))
        if not crowd.answers(client, 1):
            client = crowd.connect()


def transactional_ids(crowd: Crowd) -> None:
    """Transactional ids without end, of 30 kB each."""
    client = crowd.connect()
    for start in range(0, 10_000, 50):
        crowd.push(
            b"".join(
                frame_of(
                    Api.INIT_PRODUCER_ID, 1, transactional_id=f"{number}-" + "t" * 30_000, transaction_timeout=60_000
                )
                for number in range(start, start + 50)
            ),
            [client],
        )
        if len(crowd.answers(client, 50)) < 50:
            client = crowd.connect()


def unread_answers(crowd: Crowd) -> None:
    """Sixty clients that ask for the broker's configs again and again and never read."""
    resources = [{"resource_type": 4, "resource_name": "1", "configuration_keys": None}]
    frame = frame_of(Api.DESCRIBE_CONFIGS, 1, resources=resources, include_synonyms=True)
    for _ in range(60):
        crowd.connect()
    crowd.push(frame * 2_000)


# One client blocks all.


def crowded_batch(count: int, compression: str = "none") -> bytes:
    """A batch of so many smallest records with a key."""
    numbers = [reference.varint_bytes(number) for number in range(count)]
    body = b"".join(bytes([12 + 2 * len(one)]) + b"\0\0" + one + b"\x02k\x01\0" for one in numbers)
    first = reference.encode_batch([reference.Record(0, 0, b"k", None)], compression=compression)  # type: ignore[arg-type]
    packed = bytes(compress(compression, body)) if compression != "none" else body
    batch = bytearray(first[:HEADER_BYTES] + packed)
    header = read_header(first)._replace(batch_length=len(batch) - 12, record_count=count, last_offset_delta=count - 1)
    write_header(batch, header)
    return bytes(batch)


def create(client: socket.socket, name: str, **configs: str) -> None:
    texts = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": texts}
    ask(client, Api.CREATE_TOPICS, 4, topics=[topic], timeout=1000, validate_only=False)


def produce(client: socket.socket, topic: str, batch: bytes) -> Any:
    data = [{"name": topic, "partition_data": [{"index": 0, "records": batch}]}]
    return ask(client, Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=1000, topic_data=data)


def compacted_batches(crowd: Crowd) -> None:
    client = crowd.connect()
    create(client, "compacted", cleanup_policy="compact")
    for compression, count in (("none", 100_000), ("gzip", 700_000), ("zstd", 700_000)):
        produce(client, "compacted", crowded_batch(count, compression))


def recompressed_batches(crowd: Crowd) -> None:
    client = crowd.connect()
    for name in ("gzip", "zstd", "lz4", "snappy", "uncompressed"):
        create(client, f"re-{name}", compression_type=name)
        produce(client, f"re-{name}", crowded_batch(700_000, "zstd" if name == "gzip" else "gzip"))


def describe_configs(crowd: Crowd) -> None:
    """A thousand requests in one go, of one client that reads its answers."""
    resources = [{"resource_type": 4, "resource_name": "1", "configuration_keys": None}]
    frame = frame_of(Api.DESCRIBE_CONFIGS, 1, resources=resources, include_synonyms=True)
    clients = [crowd.connect() for _ in range(4)]
    for client in clients:
        client.sendall(frame * 150)
    for client in clients:
        crowd.answers(client, 150)


def new_topics(crowd: Crowd) -> None:
    client = crowd.connect()
    names = [{"name": f"new-{number}"} for number in range(3_000)]
    ask(client, Api.METADATA, 4, topics=names, allow_auto_topic_creation=True)
    for version in (1, 12):
        fields = {
            "topics": None,
            "allow_auto_topic_creation": False,
            "include_cluster_authorized_operations": True,
            "include_topic_authorized_operations": True,
        }
        ask(client, Api.METADATA, version, **fields)
    every = [{"resource_type": 2, "resource_name": one["name"], "configuration_keys": None} for one in names]
    ask(client, Api.DESCRIBE_CONFIGS, 1, resources=every, include_synonyms=True)
    heartbeat(client, "all", "member", subscribed_topic_regex="new-.*")
    heartbeat(client, "all", "other", subscribed_topic_names=[one["name"] for one in names])
    ask(client, Api.DESCRIBE_LOG_DIRS, 1, topics=None)
    deleted = [f"new-{number}" for number in range(1_500)]
    ask(client, Api.DELETE_TOPICS, 1, topic_names=deleted, timeout=60_000)


def wide_requests(crowd: Crowd) -> None:
    """Each API that takes lists, with as many entries as are taken."""
    client = crowd.connect()
    ask(client, Api.METADATA, 4, topics=[{"name": "wide"}], allow_auto_topic_creation=True)
    numbers = range(24_000)
    names = [f"x{number}" for number in numbers]
    for api, version, fields in _wide(numbers, names):
        client.sendall(frame_of(api, version, **fields))
        if not crowd.answers(client, 1):
            client = crowd.connect()


def _wide(numbers: range, names: list[str]) -> Iterable[tuple[Api, int, dict[str, Any]]]:
    listed = [{"partition_index": index, "timestamp": -1} for index in numbers]
    yield Api.LIST_OFFSETS, 1, {"replica_id": -1, "topics": [{"name": "wide", "partitions": listed}]}
    yield Api.METADATA, 4, {"topics": [{"name": name} for name in names], "allow_auto_topic_creation": False}
    fetched = [{"name": "wide", "partition_indexes": list(numbers)}]
    yield Api.OFFSET_FETCH, 1, {"group_id": "wide", "topics": fetched}
    commits = [
        {"partition_index": index, "committed_offset": 1, "commit_timestamp": -1, "committed_metadata": ""}
        for index in numbers
    ]
    committed = {
        "group_id": "wide",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "retention_time": -1,
        "topics": [{"name": "wide", "partitions": commits}],
    }
    yield Api.OFFSET_COMMIT, 2, committed
    yield Api.DESCRIBE_GROUPS, 0, {"groups": names}
    yield Api.DELETE_GROUPS, 0, {"groups_names": names}
    yield Api.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": names, "include_authorized_operations": True}
    yield Api.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": names}
    deleted = [{"partition_index": index, "offset": 0} for index in numbers]
    yield Api.DELETE_RECORDS, 0, {"topics": [{"name": "wide", "partitions": deleted}], "timeout": 1000}
    epochs = [{"partition": index, "leader_epoch": 0, "current_leader_epoch": -1} for index in numbers]
    wide_epochs = [{"topic": "wide", "partitions": epochs}]
    yield Api.OFFSET_FOR_LEADER_EPOCH, 2, {"topics": wide_epochs}
    parts = [{"partition": index, "fetch_offset": 0, "partition_max_bytes": 1} for index in numbers]
    fetch = {"replica_id": -1, "max_wait": 100, "min_bytes": 1, "max_bytes": 1, "isolation_level": 0}
    yield Api.FETCH, 4, {**fetch, "topics": [{"topic": "wide", "partitions": parts}]}
    every = [{"topic": f"x{number}", "partitions": parts[:1]} for number in range(12_000)]
    yield Api.FETCH, 4, {**fetch, "topics": every}
    producers = [{"name": "wide", "partition_indexes": list(numbers)}]
    yield Api.DESCRIBE_PRODUCERS, 0, {"topics": producers}
    yield Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": names}
    yield Api.DELETE_TOPICS, 1, {"topic_names": names, "timeout": 1000}
    resources = [{"resource_type": 2, "resource_name": name, "configuration_keys": None} for name in names]
    yield Api.DESCRIBE_CONFIGS, 1, {"resources": resources, "include_synonyms": False}
    change = [{"name": "retention.ms", "config_operation": 0, "value": "1"}]
    altered = [{"resource_type": 2, "resource_name": name, "configs": change} for name in names[:12_000]]
    yield Api.INCREMENTAL_ALTER_CONFIGS, 0, {"resources": altered, "validate_only": False}
    markers = [{"name": "wide", "partition_indexes": list(numbers)}]
    marked = {"producer_id": 1, "producer_epoch": 0, "transaction_result": True, "coordinator_epoch": 0}
    yield Api.WRITE_TXN_MARKERS, 1, {"markers": [{**marked, "topics": markers}]}
    yield Api.DESCRIBE_LOG_DIRS, 1, {"topics": [{"topic": "wide", "partitions": list(numbers)}]}
    new = [
        {"name": name, "num_partitions": 1, "replication_factor": 5, "assignments": [], "configs": []} for name in names
    ]
    yield Api.CREATE_TOPICS, 4, {"topics": new, "timeout": 1000, "validate_only": True}
    grown = [{"name": name, "count": 2, "assignments": None} for name in names]
    yield Api.CREATE_PARTITIONS, 0, {"topics": grown, "timeout": 1000, "validate_only": True}
    added = [{"name": "wide", "partitions": list(numbers)}]
    txn = {"v3_and_below_transactional_id": "t", "v3_and_below_producer_id": 1, "v3_and_below_producer_epoch": 0}
    yield Api.ADD_PARTITIONS_TO_TXN, 1, {**txn, "v3_and_below_topics": added}
    rules = [
        {
            "resource_type": 2,
            "resource_name": name,
            "resource_pattern_type": 3,
            "principal": "User:x",
            "host": "*",
            "operation": 3,
            "permission_type": 3,
        }
        for name in names
    ]
    yield Api.CREATE_ACLS, 1, {"creations": rules}


# Many partitions, producers, rules and timers.


def many_partitions(crowd: Crowd) -> None:
    """As many as are taken, in one topic: created, looked at, written to, committed for, grown and deleted."""
    client = crowd.connect()
    topic = {"name": "deep", "num_partitions": 3_000, "replication_factor": 1, "assignments": [], "configs": []}
    ask(client, Api.CREATE_TOPICS, 4, topics=[topic], timeout=60_000, validate_only=False)
    more = {**topic, "name": "deeper", "num_partitions": 9_000}
    ask(client, Api.CREATE_TOPICS, 4, topics=[more], timeout=60_000, validate_only=False)
    numbers = range(3_000)
    ask(client, Api.METADATA, 4, topics=[{"name": "deep"}], allow_auto_topic_creation=False)
    produce_to_all(client, "deep", numbers, reference.encode_batch([reference.Record(0, 0, b"k", b"v")]))
    commits = [
        {"partition_index": index, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": ""}
        for index in numbers
    ]
    fields = {
        "group_id": "deep",
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": "deep", "partitions": commits}],
    }
    ask(client, Api.OFFSET_COMMIT, 8, **fields)
    ask(client, Api.OFFSET_FETCH, 7, group_id="deep", topics=None, require_stable=False)
    listed = [{"partition_index": index, "timestamp": -1} for index in numbers]
    ask(client, Api.LIST_OFFSETS, 1, replica_id=-1, topics=[{"name": "deep", "partitions": listed}])
    for number in range(20):
        heartbeat(client, "deep-members", f"member-{number}", subscribed_topic_names=["deep"])
    parts = [{"partition": index, "fetch_offset": 0, "partition_max_bytes": 100} for index in numbers]
    fetch = {"replica_id": -1, "max_wait": 100, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 0}
    ask(client, Api.FETCH, 4, **fetch, topics=[{"topic": "deep", "partitions": parts}])
    ask(client, Api.DESCRIBE_LOG_DIRS, 1, topics=None)
    grown = [{"name": "deep", "count": 3_500, "assignments": None}]
    ask(client, Api.CREATE_PARTITIONS, 0, topics=grown, timeout=60_000, validate_only=False)
    ask(client, Api.DELETE_TOPICS, 1, topic_names=["deep"], timeout=60_000)


def produce_to_all(
    client: socket.socket, topic: str, numbers: Iterable[int], batch: bytes, transactional_id: str | None = None
) -> Any:
    parts = [{"index": index, "records": batch} for index in numbers]
    data = [{"name": topic, "partition_data": parts}]
    return ask(client, Api.PRODUCE, 12, transactional_id=transactional_id, acks=-1, timeout=60_000, topic_data=data)


def wide_transactions(crowd: Crowd) -> None:
    """Transactions of 2,000 partitions each, on both protocols, committed and aborted."""
    client = crowd.connect()
    topic = {"name": "txn", "num_partitions": 2_000, "replication_factor": 1, "assignments": [], "configs": []}
    ask(client, Api.CREATE_TOPICS, 4, topics=[topic], timeout=60_000, validate_only=False)
    numbers = range(2_000)
    for protocol, committed in ((2, True), (2, False), (1, True), (1, False)):
        name = f"wide-{protocol}-{committed}"
        found = ask(client, Api.INIT_PRODUCER_ID, 1, transactional_id=name, transaction_timeout=60_000)
        identity = {"producer_id": found.producer_id, "producer_epoch": found.producer_epoch}
        if protocol == 1:
            ids = {f"v3_and_below_{key}": value for key, value in {"transactional_id": name, **identity}.items()}
            added = [{"name": "txn", "partitions": list(numbers)}]
            ask(client, Api.ADD_PARTITIONS_TO_TXN, 1, **ids, v3_and_below_topics=added)
        else:
            records = [reference.Record(0, 0, b"k", b"v")]
            batch = reference.encode_batch(records, **identity, base_sequence=0, transactional=True)
            produce_to_all(client, "txn", numbers, batch, name)
        ask(client, Api.END_TXN, 5 if protocol == 2 else 3, transactional_id=name, **identity, committed=committed)


def late_transactions(crowd: Crowd) -> None:
    """Thousands of transactions that all run into their timeout in the same moment."""
    client = crowd.connect()
    create(client, "late")
    for start in range(0, 2_000, 100):
        frames = [
            frame_of(Api.INIT_PRODUCER_ID, 1, transactional_id=f"late-{number}", transaction_timeout=4_000)
            for number in range(start, start + 100)
        ]
        crowd.push(b"".join(frames), [client])
        answers = crowd.answers(client, 100)
        added = [{"name": "late", "partitions": [0]}]
        frames = [
            frame_of(
                Api.ADD_PARTITIONS_TO_TXN,
                1,
                v3_and_below_transactional_id=f"late-{start + number}",
                v3_and_below_producer_id=struct.unpack_from(">q", answer, 10)[0],
                v3_and_below_producer_epoch=struct.unpack_from(">h", answer, 18)[0],
                v3_and_below_topics=added,
            )
            for number, answer in enumerate(answers)
        ]
        crowd.push(b"".join(frames), [client])
        crowd.answers(client, 100)
    filters = {"state_filters": ["Ongoing"], "producer_id_filters": [], "duration_filter": -1}
    while ask(client, Api.LIST_TRANSACTIONS, 1, **filters).transaction_states:
        time.sleep(0.2)


def late_members(crowd: Crowd) -> None:
    """Thousands of groups whose only members go silent in the same moment."""
    client = crowd.connect()
    for start in range(0, 3_000, 100):
        frames = [
            frame_of(
                Api.JOIN_GROUP,
                1,
                group_id=f"silent-{number}",
                session_timeout=6_000,
                rebalance_timeout=6_000,
                member_id="",
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": b""}],
            )
            for number in range(start, start + 100)
        ]
        crowd.push(b"".join(frames), [client])
        crowd.answers(client, 100)
    while True:
        groups = ask(client, Api.LIST_GROUPS, 4, states_filter=["CompletingRebalance", "Stable"]).groups
        if not groups:
            break
        time.sleep(0.2)


def made_up_producers(crowd: Crowd) -> None:
    """Batches of ever new producer ids, each into many partitions: every one of them is remembered."""
    client = crowd.connect()
    topic = {"name": "ids", "num_partitions": 200, "replication_factor": 1, "assignments": [], "configs": []}
    ask(client, Api.CREATE_TOPICS, 4, topics=[topic], timeout=60_000, validate_only=False)
    for number in range(2_500):
        records = [reference.Record(0, 0, b"k", b"v")]
        batch = reference.encode_batch(records, producer_id=10**6 + number, producer_epoch=0, base_sequence=0)
        produce_to_all(client, "ids", range(200), batch)


def many_rules(crowd: Crowd) -> None:
    """Rules without end, with long names, looked for and removed one by one."""
    client = crowd.connect()
    for start in range(0, 100_000, 1_000):
        rules = [
            {
                "resource_type": 2,
                "resource_name": f"{number}-" + "n" * 200,
                "resource_pattern_type": 4,
                "principal": f"User:{number}",
                "host": "*",
                "operation": 3,
                "permission_type": 3,
            }
            for number in range(start, start + 1_000)
        ]
        answer = ask(client, Api.CREATE_ACLS, 1, creations=rules)
        if all(result.error_code for result in answer.results):
            break
    any_rule = {"resource_name_filter": None, "principal_filter": None, "host_filter": None}
    kinds = {"resource_type_filter": 2, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}
    ask(client, Api.DESCRIBE_ACLS, 1, **any_rule, **kinds)
    filters = [{**any_rule, **kinds, "principal_filter": f"User:x{number}"} for number in range(2_000)]
    ask(client, Api.DELETE_ACLS, 1, filters=filters)
    ask(client, Api.DELETE_ACLS, 1, filters=[{**any_rule, **kinds}])


def tiny_frames(crowd: Crowd) -> None:
    """A thousand connections that send the smallest requests, hundreds at a time, and read nothing."""
    frame = frame_of(Api.API_VERSIONS, 0)
    for _ in range(1_000):
        crowd.connect()
    crowd.push(frame * 500, seconds=5.0)


# A few bytes that mean very much.


def bomb(body: bytes, record_count: int, level: int | None = None) -> bytes:
    """A batch around records that no client would write, packed so that little of it is left.

    Its header promises records of a later time than there are any, so that all of them have to be looked at.
    """
    header = read_header(reference.encode_batch([reference.Record(0, 1_000, b"k", b"v")], compression="zstd"))
    packed = bytes(compress("zstd", body, level))
    batch = bytearray(HEADER_BYTES) + packed
    ends = {"batch_length": len(batch) - LENGTH_FIELD_END, "last_offset_delta": record_count - 1}
    write_header(batch, header._replace(**ends, record_count=record_count, max_timestamp=10_000))
    return bytes(batch)


def record_with_headers(count: int) -> bytes:
    start = b"\0\0\0\2k\1" + reference.varint_bytes(count)
    return reference.varint_bytes(len(start) + 2 * count) + start + bytes(2 * count)


def records_without_end(count: int) -> bytes:
    body = bytearray()
    for offset in range(count):
        reference.write_record(body, reference.Record(offset, 0, b"", None), 0, 0)
    return bytes(body)


def configured(client: socket.socket, name: str, partitions: int = 1, **configs: object) -> None:
    entries = [{"name": key.replace("_", "."), "value": str(value)} for key, value in configs.items()]
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "assignments": []}
    ask(client, Api.CREATE_TOPICS, 4, topics=[{**topic, "configs": entries}], timeout=30_000, validate_only=False)


def store(client: socket.socket, topic: str, batch: bytes, numbers: Iterable[int] = (0,)) -> Any:
    parts = [{"index": index, "records": batch} for index in numbers]
    data = [{"name": topic, "partition_data": parts}]
    return ask(client, Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=30_000, topic_data=data)


def look_up_time(client: socket.socket, topic: str, timestamp_ms: int, times: int = 1) -> Any:
    parts = [{"partition_index": 0, "timestamp": timestamp_ms}] * times
    return ask(
        client, Api.LIST_OFFSETS, 2, replica_id=-1, isolation_level=0, topics=[{"name": topic, "partitions": parts}]
    )


def header_bombs(crowd: Crowd) -> None:
    """Records with millions of headers in a kilobyte: looked for by time, and in topics whose records are looked at."""
    client = crowd.connect()
    configured(client, "plain")
    store(client, "plain", bomb(record_with_headers(30_000_000), 1))
    for timestamp_ms in (500, 1_000, 5_000):
        look_up_time(client, "plain", timestamp_ms)
    small = bomb(record_with_headers(4_000_000), 1)
    configured(client, "compacted", 4, cleanup_policy="compact")
    configured(client, "large", cleanup_policy="compact", max_message_bytes=64 << 20)
    configured(client, "packed", compression_type="gzip")
    for _ in range(3):
        store(client, "compacted", small, range(4))
        store(client, "large", bomb(record_with_headers(30_000_000), 1))
        store(client, "packed", small)


def record_bombs(crowd: Crowd) -> None:
    """A million records in some kilobytes. A neighbour's batch must not wait until they have been looked through."""
    client, neighbour = crowd.connect(), crowd.connect()
    configured(client, "compacted", 2, cleanup_policy="compact")
    configured(client, "plain")
    batch = bomb(records_without_end(800_000), 800_000)
    usual = [reference.Record(number, 0, b"key-%d" % number, bytes(100)) for number in range(40)]
    store(neighbour, "compacted", reference.encode_batch(usual, compression="zstd"), [1])
    parts = [{"name": "compacted", "partition_data": [{"index": 0, "records": batch}]}]
    frame = frame_of(Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=30_000, topic_data=parts)
    for _ in range(3):
        client.sendall(frame)
        time.sleep(0.1)  # it is being looked through
        began = time.monotonic()
        store(neighbour, "compacted", reference.encode_batch(usual, compression="zstd"), [1])
        took_s = time.monotonic() - began
        client.setblocking(False)
        try:
            assert not client.recv(1), "the batch was looked through too soon to tell"
        except BlockingIOError:
            client.setblocking(True)
        assert took_s < 0.5, f"a neighbour waited for {took_s:.1f} s"
        crowd.answers(client, 1)
    store(client, "plain", batch)
    look_up_time(client, "plain", 5_000)
    look_up_time(client, "plain", 500)


def wide_windows(crowd: Crowd) -> None:
    """Forty searches at a time in a batch for which zstd keeps a hundred megabytes each."""
    client = crowd.connect()
    configured(client, "plain")
    store(client, "plain", bomb(record_with_headers(60_000_000), 1, level=22))
    parts = [{"partition_index": 0, "timestamp": 5_000}]
    found = {"replica_id": -1, "isolation_level": 0, "topics": [{"name": "plain", "partitions": parts}]}
    for _ in range(40):
        crowd.connect().sendall(frame_of(Api.LIST_OFFSETS, 2, **found))
    for other in crowd.open[1:]:
        crowd.answers(other, 1)


def repeated_partitions(crowd: Crowd) -> None:
    """One partition with thousands of producers and batches, asked for again and again in one request."""
    client = crowd.connect()
    configured(client, "repeated", index_interval_bytes=2**31 - 1)
    for start in range(0, 20_000, 50):
        frames: list[bytes] = []
        for number in range(start, start + 50):
            records = [reference.Record(0, 1_000 + number, b"k", b"v")]
            batch = reference.encode_batch(records, producer_id=10**6 + number, producer_epoch=0, base_sequence=0)
            data = [{"name": "repeated", "partition_data": [{"index": 0, "records": batch}]}]
            frames.append(frame_of(Api.PRODUCE, 7, transactional_id=None, acks=1, timeout=1000, topic_data=data))
        crowd.push(b"".join(frames), [client])
        crowd.answers(client, 50)
    for times in (1, 100):
        topics = [{"name": "repeated", "partition_indexes": [0] * times}]
        ask(client, Api.DESCRIBE_PRODUCERS, 0, topics=topics)
        look_up_time(client, "repeated", 20_999, times)
        look_up_time(client, "repeated", 10**9, times)
    for offset in range(0, 20_000, 97):
        part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 100}
        fetch = {"replica_id": -1, "max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 0}
        ask(client, Api.FETCH, 4, **fetch, topics=[{"topic": "repeated", "partitions": [part]}])


def large_messages(crowd: Crowd) -> None:
    """Messages of ninety megabytes, written and read by several clients, also where the broker stamps the time."""
    client = crowd.connect()
    size = 90 << 20
    for name, kind in (("plain", "CreateTime"), ("stamped", "LogAppendTime")):
        configured(client, name, max_message_bytes=size + 1_000, message_timestamp_type=kind)
        batch = reference.encode_batch([reference.Record(0, 1_000, b"k", bytes(size))])
        for offset in range(2):
            answer = store(client, name, batch).responses[0].partition_responses[0]
            assert (answer.error_code, answer.base_offset) == (0, offset), answer
        for offset in range(2):
            part = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
            fetch = {"replica_id": -1, "max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "isolation_level": 1}
            answer = ask(client, Api.FETCH, 4, **fetch, topics=[{"topic": name, "partitions": [part]}])
            found = answer.responses[0].partitions[0].records
            assert found is not None
            assert found[-size:] == batch[-size:], len(found)


def metrics_of_many(crowd: Crowd) -> None:
    """Thousands of partitions and groups on a page that several readers ask for at the same time."""
    client = crowd.connect()
    configured(client, "wide", 3_900)
    batch = reference.encode_batch([reference.Record(0, 0, b"k", b"v")])
    for start in range(0, 3_900, 500):
        store(client, "wide", batch, range(start, start + 500))
    host, _, port = crowd.page.removeprefix("http://").partition("/")[0].rpartition(":")
    readers = [socket.create_connection((host, int(port)), timeout=PATIENCE_S) for _ in range(5)]
    for reader in readers:
        reader.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    for reader in readers:
        with reader, reader.makefile("rb") as page:
            text = page.read()
            assert text.count(b"log_end_offset{") >= 3_900, text[:1000]


# Users.


def scram_users(crowd: Crowd) -> None:
    """Credentials with salts of megabytes, then as many credentials as are taken, asked for all at once."""
    usual = {"mechanism": 1, "iterations": 4096, "salted_password": bytes(32)}
    for number in range(20):
        large = [{**usual, "name": f"large-{number}", "salt": bytes(8 << 20)}]
        other = crowd.connect()
        crowd.push(frame_of(Api.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=large), [other])
        assert not crowd.answers(other, 1), "a salt of eight megabytes was read"
    client = crowd.connect()
    for number in range(20):
        large = [{**usual, "name": f"large-{number}", "salt": bytes(1 << 20)}]
        answer = ask(client, Api.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=large)
        assert answer.results[0].error_code, "a salt of a megabyte was taken"
    for start in range(0, 40_000, 5_000):
        users = [{**usual, "name": f"user-{number}", "salt": b"salt"} for number in range(start, start + 5_000)]
        answer = ask(client, Api.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=[], upsertions=users)
        if answer.results[0].error_code:
            break
    else:
        raise AssertionError("credentials without end were taken")
    for _ in range(3):
        ask(client, Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=None)
        gone = [{"name": "user-1", "mechanism": 1}]
        ask(client, Api.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=gone, upsertions=[])


def logins_at_once(crowd: Crowd) -> None:
    """Four hundred passwords at the same moment, right and wrong, of users and of nobody."""
    handshake = frame_of(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
    for _ in range(2):
        clients = [crowd.connect() for _ in range(400)]
        crowd.push(handshake, clients)
        for client in clients:
            crowd.answers(client, 1)
        for number, client in enumerate(clients):
            token = (f"\0{USER}\0{PASSWORD}", f"\0{USER}\0wrong", f"\0nobody-{number}\0wrong")[number % 3]
            client.setblocking(True)
            client.sendall(frame_of(Api.SASL_AUTHENTICATE, 0, auth_bytes=token.encode()))
        for client in clients:
            crowd.answers(client, 1)
            client.close()


ATTACKS: dict[str, Callable[[Crowd], None]] = {
    attack.__name__: attack
    for attack in (
        regex_list_transactions,
        regex_group,
        waiting_fetches,
        many_small_fetches,
        before_login,
        half_frames,
        long_names,
        long_sessions,
        pending_members,
        large_members,
        transactional_ids,
        unread_answers,
        compacted_batches,
        recompressed_batches,
        describe_configs,
        new_topics,
        wide_requests,
        many_partitions,
        wide_transactions,
        late_transactions,
        late_members,
        made_up_producers,
        many_rules,
        tiny_frames,
        header_bombs,
        record_bombs,
        wide_windows,
        large_messages,
        metrics_of_many,
        repeated_partitions,
        scram_users,
        logins_at_once,
    )
}


def main() -> None:
    name, place, page = sys.argv[1:]
    host, _, port = place.rpartition(":")
    crowd = Crowd((host, int(port)), page)
    ATTACKS[name](crowd)
    print(f"{len(crowd.open)} connections, {crowd.closed} closed by the broker", flush=True)


if __name__ == "__main__":
    main()
