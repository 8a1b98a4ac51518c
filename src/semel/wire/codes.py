"""One table from error code to action, each row with its reason.

The general rows hold for every API; `OVERRIDES` has the few places where the same code means something else. Nothing in
the client decides on an error code outside this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kio.schema.errors import ErrorCode

from semel.wire.api import Api


class Action(Enum):
    """What a client does about an error."""

    RETRIABLE = "retriable"
    """Send the same request again; nothing is decided."""
    ABORTABLE = "abortable"
    """The request failed for good, and with it the transaction it belongs to; a new transaction may begin."""
    FATAL = "fatal"
    """This client object cannot go on."""


class Refresh(Enum):
    """What a client must ask for anew before it retries."""

    NOTHING = "nothing"
    LEADER = "leader"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row of the table. `soon` marks conditions that pass within milliseconds, not after a usual back-off."""

    action: Action
    reason: str
    refresh: Refresh = Refresh.NOTHING
    soon: bool = False


def _retry(reason: str, refresh: Refresh = Refresh.NOTHING, *, soon: bool = False) -> Verdict:
    return Verdict(Action.RETRIABLE, reason, refresh, soon)


def _abort(reason: str) -> Verdict:
    return Verdict(Action.ABORTABLE, reason)


def _fatal(reason: str) -> Verdict:
    return Verdict(Action.FATAL, reason)


TABLE: Final[Mapping[ErrorCode, Verdict]] = {
    # The leader moved, is being elected, or this broker has not heard of it yet.
    ErrorCode.unknown_topic_or_partition: _retry("a new topic reaches the brokers one after another", Refresh.LEADER),
    ErrorCode.leader_not_available: _retry("an election is under way", Refresh.LEADER),
    ErrorCode.not_leader_or_follower: _retry("leadership moved to another broker", Refresh.LEADER),
    ErrorCode.replica_not_available: _retry("the replica is being moved", Refresh.LEADER),
    ErrorCode.fenced_leader_epoch: _retry("our metadata is older than the broker's", Refresh.LEADER),
    ErrorCode.unknown_leader_epoch: _retry("our metadata is newer than the broker's", Refresh.LEADER),
    ErrorCode.kafka_storage_error: _retry("a disk of the leader failed; another replica takes over", Refresh.LEADER),
    ErrorCode.network_exception: _retry("a connection between brokers failed", Refresh.LEADER),
    ErrorCode.broker_not_available: _retry("the broker is starting or stopping", Refresh.LEADER),
    ErrorCode.offset_not_available: _retry("the new leader's high watermark lags behind for a moment", soon=True),
    ErrorCode.not_controller: _retry("the controller moved", Refresh.LEADER),
    # The coordinator moved or is loading its log.
    ErrorCode.coordinator_load_in_progress: _retry("the coordinator reads its log after a move", soon=True),
    ErrorCode.coordinator_not_available: _retry("the coordinator's partition has no leader yet", Refresh.COORDINATOR),
    ErrorCode.not_coordinator: _retry("the coordinator moved", Refresh.COORDINATOR),
    # Conditions that pass by themselves.
    ErrorCode.concurrent_transactions: _retry("markers of the previous transaction are still being written", soon=True),
    ErrorCode.not_enough_replicas: _retry("too few replicas in sync, or right after a commit its markers", soon=True),
    ErrorCode.not_enough_replicas_after_append: _retry("stored, not yet replicated; the sequence stops a repeat"),
    ErrorCode.request_timed_out: _retry("stored or not is open; the sequence stops a repeat", Refresh.LEADER),
    ErrorCode.corrupt_message: _retry("the batch was damaged on its way and was not stored"),
    ErrorCode.unstable_offset_commit: _retry("a transaction with offsets of this group is open (KIP-447)", soon=True),
    ErrorCode.throttling_quota_exceeded: _retry("the broker asks for a slower pace"),
    ErrorCode.fetch_session_id_not_found: _retry("the broker dropped the fetch session; begin a new one", soon=True),
    ErrorCode.invalid_fetch_session_epoch: _retry("the fetch session went out of step; begin a new one", soon=True),
    # The transaction is lost, the producer is not.
    ErrorCode.transaction_abortable: _abort("the coordinator asks to abort (KIP-1050)"),
    ErrorCode.invalid_producer_epoch: _abort("the coordinator ended the transaction, by time-out or by another owner"),
    ErrorCode.out_of_order_sequence_number: _abort("a batch before this one is not in the log"),
    ErrorCode.unknown_producer_id: _abort("the broker no longer knows this producer's sequences (KIP-360)"),
    ErrorCode.duplicate_sequence_number: _abort("a batch outside of the remembered five was repeated"),
    ErrorCode.message_too_large: _abort("the batch is over the topic's max.message.bytes"),
    ErrorCode.record_list_too_large: _abort("the batch is over the broker's segment size"),
    ErrorCode.invalid_record: _abort("the broker refused a record, such as a null key on a compacted topic"),
    ErrorCode.invalid_timestamp: _abort("a timestamp is outside of what the topic accepts"),
    ErrorCode.unsupported_for_message_format: _abort("the topic's message format is too old"),
    ErrorCode.unsupported_compression_type: _abort("the broker is too old for this compression"),
    ErrorCode.invalid_topic_exception: _abort("the topic's name is not allowed"),
    ErrorCode.policy_violation: _abort("a policy of the broker refused it"),
    ErrorCode.topic_authorization_failed: _abort("an ACL forbids this topic"),
    ErrorCode.group_authorization_failed: _abort("an ACL forbids this group"),
    ErrorCode.illegal_generation: _abort("the group rebalanced: the offsets belong to somebody else now (KIP-447)"),
    ErrorCode.unknown_member_id: _abort("this member was removed from the group (KIP-447)"),
    ErrorCode.fenced_instance_id: _abort("another member took over this group.instance.id"),
    ErrorCode.rebalance_in_progress: _abort("the group is rebalancing"),
    ErrorCode.stale_member_epoch: _abort("the member's epoch moved on while offsets were committed (KIP-848)"),
    ErrorCode.fenced_member_epoch: _abort("this member was fenced out of its group (KIP-848)"),
    ErrorCode.member_id_required: _retry("the coordinator has given a member id to join with (KIP-394)", soon=True),
    ErrorCode.unreleased_instance_id: _retry("the last member with this group.instance.id has not left yet"),
    ErrorCode.offset_metadata_too_large: _abort("the metadata beside an offset is over offset.metadata.max.bytes"),
    ErrorCode.invalid_commit_offset_size: _abort("the offsets do not fit into one batch of the group's log"),
    ErrorCode.operation_not_attempted: _abort("another partition of the same request was refused"),
    ErrorCode.offset_out_of_range: _abort("the position is outside of what the partition holds"),
    ErrorCode.group_id_not_found: _abort("the group is not there"),
    ErrorCode.group_subscribed_to_topic: _abort("members of the group still read this topic"),
    ErrorCode.non_empty_group: _abort("the group still has members"),
    ErrorCode.topic_already_exists: _abort("a topic of this name is there"),
    ErrorCode.invalid_partitions: _abort("the number of partitions is not allowed"),
    ErrorCode.invalid_replication_factor: _abort("there are fewer brokers than replicas asked for"),
    ErrorCode.invalid_config: _abort("a setting is not allowed"),
    # The producer is lost.
    ErrorCode.producer_fenced: _fatal("a newer producer with the same transactional.id took over"),
    ErrorCode.invalid_producer_id_mapping: _fatal("the coordinator forgot or reassigned this transactional.id"),
    ErrorCode.invalid_txn_state: _fatal("client and coordinator disagree on the transaction's state"),
    ErrorCode.invalid_transaction_timeout: _fatal("transaction.timeout.ms is over the broker's maximum"),
    ErrorCode.transactional_id_authorization_failed: _fatal("an ACL forbids this transactional.id"),
    ErrorCode.transactional_id_not_found: _fatal("the coordinator knows no such transactional.id"),
    ErrorCode.transaction_coordinator_fenced: _fatal("a marker came from a coordinator that was replaced"),
    ErrorCode.inconsistent_group_protocol: _fatal("the group's members have no assignor in common with this one"),
    ErrorCode.invalid_session_timeout: _fatal("the broker's group.min/max.session.timeout.ms do not allow this one"),
    ErrorCode.invalid_group_id: _fatal("the group's name is not allowed"),
    ErrorCode.group_max_size_reached: _fatal("the group has as many members as the broker allows"),
    ErrorCode.unsupported_assignor: _fatal("the broker does not have this group.remote.assignor"),
    ErrorCode.cluster_authorization_failed: _fatal("an ACL forbids this on the cluster"),
    ErrorCode.sasl_authentication_failed: _fatal("the credentials were refused"),
    ErrorCode.unsupported_sasl_mechanism: _fatal("the broker does not offer this sasl.mechanism"),
    ErrorCode.illegal_sasl_state: _fatal("the listener does not expect SASL"),
    ErrorCode.unsupported_version: _fatal("the broker is too old or too new for this request"),
    ErrorCode.invalid_request: _fatal("the broker could not make sense of the request"),
    ErrorCode.invalid_required_acks: _fatal("acks is none of 0, 1 and all"),
    ErrorCode.security_disabled: _fatal("the broker has no authorizer"),
    ErrorCode.unknown_server_error: _fatal("the broker failed inside; its log says why"),
}

_COORDINATOR_APIS: Final = (
    Api.INIT_PRODUCER_ID,
    Api.ADD_PARTITIONS_TO_TXN,
    Api.ADD_OFFSETS_TO_TXN,
    Api.TXN_OFFSET_COMMIT,
    Api.END_TXN,
)

OVERRIDES: Final[Mapping[tuple[Api, ErrorCode], Verdict]] = {
    # The coordinator knows the current epoch, so here an old one is proof of a newer owner (brokers before 2.7 have no
    # PRODUCER_FENCED). A partition leader only knows that the epoch moved, which a time-out does as well.
    **{
        (api, ErrorCode.invalid_producer_epoch): _fatal("the coordinator has a newer epoch for this transactional.id")
        for api in _COORDINATOR_APIS
    },
    # TxnOffsetCommit goes to the group's coordinator; a partition of its log without a leader looks like this.
    (Api.TXN_OFFSET_COMMIT, ErrorCode.unknown_topic_or_partition): _retry(
        "the group's log is being created or moved", Refresh.COORDINATOR
    ),
    (Api.TXN_OFFSET_COMMIT, ErrorCode.request_timed_out): _retry("offsets are idempotent", Refresh.COORDINATOR),
}

_UNLISTED: Final = _fatal("this code is not expected here")


def verdict(code: ErrorCode, api: Api) -> Verdict:
    """What to do about `code` in an answer of `api`.

    >>> verdict(ErrorCode.concurrent_transactions, Api.INIT_PRODUCER_ID).action
    <Action.RETRIABLE: 'retriable'>
    """
    return OVERRIDES.get((api, code)) or TABLE.get(code, _UNLISTED)
