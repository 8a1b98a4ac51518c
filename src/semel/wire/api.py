"""Which APIs Semel's client and its broker speak, in which versions, and what a broker said it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from semel.errors import UnsupportedByBroker


class Api(IntEnum):
    """Kafka's API keys, by Kafka's names."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44
    OFFSET_DELETE = 47
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    DESCRIBE_TOPIC_PARTITIONS = 75


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Versions `lowest..highest` of an API, both included."""

    lowest: int
    highest: int


# The lowest versions are those of Kafka 2.5, where KIP-447 and KIP-360 arrived: below them a field would have to be
# left out that the guarantees rest on. The highest stay below a change of layout (topic ids, several groups in one
# request) that would bring a second way to say the same thing.
CLIENT_VERSIONS: Final[Mapping[Api, VersionRange]] = {
    Api.PRODUCE: VersionRange(3, 12),  # 12 is transaction protocol 2; 13 has topic ids
    Api.FETCH: VersionRange(4, 12),  # 13 has topic ids
    Api.LIST_OFFSETS: VersionRange(2, 7),  # 2 brought the isolation level
    Api.METADATA: VersionRange(4, 12),  # 4 brought "do not create the topic"
    Api.OFFSET_COMMIT: VersionRange(2, 8),
    Api.OFFSET_FETCH: VersionRange(1, 7),  # 7 brought RequireStable; 8 has several groups
    Api.FIND_COORDINATOR: VersionRange(1, 3),  # 4 has several keys
    Api.JOIN_GROUP: VersionRange(5, 9),  # 5 brought static members; 9 tells the leader to leave all as it is
    Api.HEARTBEAT: VersionRange(3, 4),
    Api.LEAVE_GROUP: VersionRange(3, 5),
    Api.SYNC_GROUP: VersionRange(3, 5),
    Api.DESCRIBE_GROUPS: VersionRange(0, 5),
    Api.LIST_GROUPS: VersionRange(0, 4),
    Api.SASL_HANDSHAKE: VersionRange(1, 1),
    Api.API_VERSIONS: VersionRange(0, 3),
    Api.CREATE_TOPICS: VersionRange(2, 7),
    Api.DELETE_TOPICS: VersionRange(1, 5),  # 6 has topic ids
    Api.DELETE_RECORDS: VersionRange(0, 2),
    Api.OFFSET_FOR_LEADER_EPOCH: VersionRange(2, 4),  # 2 brought the current leader epoch
    Api.INIT_PRODUCER_ID: VersionRange(3, 6),  # 3 brought KIP-360's id and epoch; 6 is two-phase commit
    Api.ADD_PARTITIONS_TO_TXN: VersionRange(0, 3),  # 4 is for brokers
    Api.ADD_OFFSETS_TO_TXN: VersionRange(0, 3),
    Api.END_TXN: VersionRange(1, 5),  # 5 is transaction protocol 2
    Api.WRITE_TXN_MARKERS: VersionRange(1, 1),  # only to abort a hanging transaction
    Api.TXN_OFFSET_COMMIT: VersionRange(3, 5),  # 3 is KIP-447; 5 is transaction protocol 2
    Api.DESCRIBE_CONFIGS: VersionRange(1, 4),
    Api.SASL_AUTHENTICATE: VersionRange(0, 2),
    Api.CREATE_PARTITIONS: VersionRange(0, 3),
    Api.DELETE_GROUPS: VersionRange(0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: VersionRange(0, 1),
    Api.OFFSET_DELETE: VersionRange(0, 0),
    Api.DESCRIBE_CLUSTER: VersionRange(0, 1),
    Api.DESCRIBE_PRODUCERS: VersionRange(0, 0),
    Api.DESCRIBE_TRANSACTIONS: VersionRange(0, 0),
    Api.LIST_TRANSACTIONS: VersionRange(0, 1),
    Api.CONSUMER_GROUP_HEARTBEAT: VersionRange(1, 1),  # in 0, of Kafka's trial releases, the broker makes the member id
    Api.CONSUMER_GROUP_DESCRIBE: VersionRange(0, 1),
}

FIELDS_GONE: Final[Mapping[Api, frozenset[str]]] = {
    Api.METADATA: frozenset({"include_cluster_authorized_operations"}),
    Api.OFFSET_COMMIT: frozenset({"retention_time"}),
}
"""Fields of requests that older versions have and the highest no longer has. Written down here, because to look through
all versions would load them: a tenth of a second for a process that asks one question."""

# The versions from which an API speaks transaction protocol 2: with them the broker adds partitions and groups to the
# transaction by itself and bumps the epoch at its end. Sent while the feature is off, they break the transaction.
PROTOCOL_2_VERSIONS: Final[Mapping[Api, int]] = {Api.PRODUCE: 12, Api.END_TXN: 5, Api.TXN_OFFSET_COMMIT: 5}

TWO_PHASE_COMMIT_VERSION: Final = 6
"""The version of InitProducerId that brought two-phase commit (KIP-939). No release of Apache Kafka offers it yet."""

# Where an API came later than the oldest Kafka that Semel works with, 2.5.
_KAFKA_WITH: Final[Mapping[Api, str]] = {
    Api.DESCRIBE_PRODUCERS: "2.8",
    Api.DESCRIBE_TRANSACTIONS: "3.0",
    Api.LIST_TRANSACTIONS: "3.0",
    Api.WRITE_TXN_MARKERS: "3.0",
    Api.CONSUMER_GROUP_HEARTBEAT: "4.0",
    Api.CONSUMER_GROUP_DESCRIBE: "4.0",
}

TRANSACTION_FEATURE: Final = "transaction.version"


@dataclass(frozen=True, slots=True)
class BrokerCapabilities:
    """What one broker answered to ApiVersions."""

    versions: Mapping[int, VersionRange]
    finalized_features: Mapping[str, int] = field(default_factory=dict[str, int])
    finalized_features_epoch: int = -1

    @property
    def transaction_protocol(self) -> int:
        """1 or 2. Only the *finalized* feature counts: a broker offers the request versions before the cluster agreed.

        >>> BrokerCapabilities({}, {"transaction.version": 2}, finalized_features_epoch=7).transaction_protocol
        2
        >>> BrokerCapabilities({}, {"transaction.version": 2}, finalized_features_epoch=-1).transaction_protocol
        1
        """
        agreed = self.finalized_features_epoch >= 0
        return 2 if agreed and self.finalized_features.get(TRANSACTION_FEATURE, 0) >= 2 else 1

    def version_for(self, api: Api, *, highest: int | None = None, lowest: int = 0) -> int:
        """The highest version that broker and client share, at most `highest`; `UnsupportedByBroker` if there is none.

        >>> BrokerCapabilities({26: VersionRange(0, 9)}).version_for(Api.END_TXN)
        5
        """
        ours = CLIENT_VERSIONS[api]
        theirs = self.versions.get(api)
        name = api.name.title().replace("_", "")
        if theirs is None:
            raise UnsupportedByBroker(
                f"The broker does not know {name}: it is too old for this or has it switched off, and nothing was "
                f"sent. Upgrade it to Apache Kafka {_KAFKA_WITH.get(api, '2.5')} or newer."
            )
        version = min(ours.highest, theirs.highest, ours.highest if highest is None else highest)
        if version < max(ours.lowest, theirs.lowest, lowest):
            raise UnsupportedByBroker(
                f"The broker speaks {name} versions {theirs.lowest}-{theirs.highest}, and Semel needs "
                f"{max(ours.lowest, lowest)}-{ours.highest}; nothing was sent. "
                f"Use Apache Kafka {_KAFKA_WITH.get(api, '2.5')} or newer (or a newer Semel)."
            )
        return version
