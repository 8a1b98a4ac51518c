"""From an error code to the exception a user meets: what happened, what it means for the data, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.errors import (
    Fenced,
    KafkaError,
    NotAuthorized,
    OffsetOutOfRange,
    TransactionAborted,
    UnknownTopic,
)
from semel.wire import Action, Api, ErrorCode, verdict

_FENCED: Final = (
    "Another producer with the same transactional.id has taken over, so this one can no longer write and what it had "
    "not committed is aborted. Stop this instance, or give each its own transactional.id (its own `instance`, for "
    "semel.Session and semel.run)."
)

# Sentences for the codes users meet most; `{what}` is what the call was about.
_SENTENCES: Final[Mapping[ErrorCode, tuple[type[KafkaError], str]]] = {
    ErrorCode.unknown_topic_or_partition: (
        UnknownTopic,
        "The cluster has no {what}; nothing was written to it or read from it. Create it, or check the name.",
    ),
    ErrorCode.producer_fenced: (Fenced, _FENCED),
    ErrorCode.invalid_producer_epoch: (Fenced, _FENCED),
    ErrorCode.invalid_producer_id_mapping: (
        Fenced,
        "The coordinator no longer knows this producer for {what}: the id expired (transactional.id.expiration.ms) or "
        "was taken over. What was not committed is aborted; make a new producer.",
    ),
    ErrorCode.invalid_transaction_timeout: (
        KafkaError,
        "The broker refuses this transaction.timeout.ms for {what}, and nothing was written. Lower it, or raise the "
        "broker's transaction.max.timeout.ms.",
    ),
    ErrorCode.message_too_large: (
        KafkaError,
        "A batch for {what} is over the topic's max.message.bytes and was not stored. Raise max.message.bytes on the "
        "topic, lower batch.size, or make the record smaller.",
    ),
    ErrorCode.topic_authorization_failed: (
        NotAuthorized,
        "This user may not use {what}; nothing was stored or read. Grant the ACL for it.",
    ),
    ErrorCode.group_authorization_failed: (
        NotAuthorized,
        "This user may not use {what}; nothing was committed. Grant READ on the group.",
    ),
    ErrorCode.transactional_id_authorization_failed: (
        NotAuthorized,
        "This user may not use {what}; nothing was written. Grant WRITE and DESCRIBE on the transactional id.",
    ),
    ErrorCode.cluster_authorization_failed: (
        NotAuthorized,
        "This user may not do this on the cluster ({what}); nothing was changed. Grant the ACL for it.",
    ),
    ErrorCode.offset_out_of_range: (
        OffsetOutOfRange,
        "The position asked for in {what} is not in the log (any more): records may have been deleted before they were "
        "read. If it is acceptable to go on without them, set auto.offset.reset=earliest.",
    ),
}


_MEANING: Final[Mapping[Api, str]] = {
    Api.PRODUCE: " The batch was not stored.",
    **dict.fromkeys(
        (Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT, Api.END_TXN),
        " What was not committed will not be seen.",
    ),
}


def failure(code: ErrorCode, api: Api, what: str, message: str | None = None) -> KafkaError:
    """The exception for `code` in an answer of `api` about `what`."""
    judged = verdict(code, api)
    kind, sentence = _SENTENCES.get(code, (KafkaError, ""))
    if code == ErrorCode.invalid_producer_epoch and judged.action is Action.ABORTABLE:
        kind, sentence = (
            TransactionAborted,
            "The coordinator has ended this transaction ({what}): it ran longer than transaction.timeout.ms, or "
            "another producer took over. Nothing of it will be seen; abort and begin again.",
        )
    if not sentence:
        said = f" The broker says: {message}" if message and message != code.name else ""
        sentence = (
            f"{code.name.upper()} for {{what}}: {judged.reason}."
            f"{_MEANING.get(api, '') if judged.action is Action.ABORTABLE else ''}"
            f"{_clip(said).replace('{', '(').replace('}', ')')}"
        )
    return kind(sentence.format(what=what), code=code, is_fatal=judged.action is Action.FATAL)


def _clip(text: str, longest: int = 200) -> str:
    # Spark's log redaction overflows its stack on very long messages.
    return text if len(text) <= longest else text[: longest - 1] + "…"
