"""What an operator sees of the transactions: DescribeTransactions for one id, ListTransactions with its filters."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from semel.core.refusal import Refused
from semel.core.transaction_metadata import TransactionMetadata, TransactionStatus
from semel.core.transactions import TransactionCoordinator


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """`unknown_state_filters` are the asked-for states that do not exist, given back to the asker."""

    transactions: tuple[TransactionMetadata, ...]
    unknown_state_filters: tuple[str, ...] = ()


def describe_transaction(coordinator: TransactionCoordinator, transactional_id: str) -> TransactionMetadata:
    """Refused with INVALID_REQUEST for an empty id and with TRANSACTIONAL_ID_NOT_FOUND for one that is not known."""
    if not transactional_id:
        raise Refused(ErrorCode.invalid_request, "the transactional id is empty")
    metadata = coordinator.get(transactional_id)
    if metadata is None:
        raise Refused(ErrorCode.transactional_id_not_found, f"{transactional_id!r} is not known")
    return metadata


def list_transactions(
    coordinator: TransactionCoordinator,
    *,
    now_ms: int,
    state_filters: Collection[str] = (),
    producer_id_filters: Collection[int] = (),
    duration_filter_ms: int = -1,
    transactional_id_pattern: str | None = None,
) -> TransactionListing:
    """Those that pass all filters; an empty or negative filter lets all pass.

    As in Kafka, an id without a transaction has the start time -1, so that any `duration_filter_ms` lets it pass. The
    pattern must match the whole id; one that is no regular expression is refused with INVALID_REGULAR_EXPRESSION.
    """
    statuses = {title: TransactionStatus.by_title(title) for title in state_filters}
    pattern = _compile(transactional_id_pattern) if transactional_id_pattern else None

    def passes(metadata: TransactionMetadata) -> bool:
        return (
            (not producer_id_filters or metadata.producer_id in producer_id_filters)
            and (not statuses or metadata.status in statuses.values())
            and (duration_filter_ms < 0 or now_ms - metadata.start_ms > duration_filter_ms)
            and (pattern is None or pattern.fullmatch(metadata.transactional_id) is not None)
        )

    return TransactionListing(
        tuple(metadata for metadata in coordinator if passes(metadata)),
        tuple(title for title, status in statuses.items() if status is None),
    )


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Refused(ErrorCode.invalid_regular_expression, f"{pattern!r}: {error}") from error
