"""What an operator sees of the transactions: DescribeTransactions for one id, ListTransactions with its filters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from semel.core.linear_regex import STEPS_MAX, Budget, LinearRegex, UnusableRegex
from semel.core.refusal import Refused
from semel.core.transaction_metadata import TransactionMetadata, TransactionStatus
from semel.core.transactions import TransactionCoordinator

_AT_ONCE: Final = 2_000
_STEPS_MAX: Final = 10 * STEPS_MAX
"""More than a subscription has, since it is done in slices: there may be more transactional ids than topics."""


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
    may_describe: Callable[[str], bool],
    state_filters: Collection[str] = (),
    producer_id_filters: Collection[int] = (),
    duration_filter_ms: int = -1,
    transactional_id_pattern: str | None = None,
) -> Generator[None, None, TransactionListing]:
    """Those that the client may see and that pass all filters; an empty or negative filter lets all pass.

    In slices: it yields where others may have a turn, and returns the listing. As in Kafka, an id without a transaction
    has the start time -1, so that any `duration_filter_ms` lets it pass. The pattern must match the whole id; one that
    is no regular expression, or that takes too long, is refused with INVALID_REGULAR_EXPRESSION.
    """
    statuses = {title: TransactionStatus.by_title(title) for title in state_filters}
    wanted_statuses = set(statuses.values())
    wanted_producer_ids = set(producer_id_filters)

    def passes(metadata: TransactionMetadata) -> bool:
        return (
            (not wanted_producer_ids or metadata.producer_id in wanted_producer_ids)
            and (not wanted_statuses or metadata.status in wanted_statuses)
            and (duration_filter_ms < 0 or now_ms - metadata.start_ms > duration_filter_ms)
            and may_describe(metadata.transactional_id)
        )

    passing: list[TransactionMetadata] = []
    for number, metadata in enumerate(list(coordinator), 1):
        if passes(metadata):
            passing.append(metadata)
        if number % _AT_ONCE == 0:
            yield
    if transactional_id_pattern:
        matching = yield from _matching(transactional_id_pattern, [metadata.transactional_id for metadata in passing])
        passing = [metadata for metadata in passing if metadata.transactional_id in matching]
    return TransactionListing(tuple(passing), tuple(title for title, status in statuses.items() if status is None))


def _matching(pattern: str, transactional_ids: Iterable[str]) -> Generator[None, None, set[str]]:
    try:
        regex = LinearRegex(pattern)
        yield
        return set((yield from regex.selecting(transactional_ids, Budget(_STEPS_MAX))))
    except UnusableRegex as error:
        raise Refused(ErrorCode.invalid_regular_expression, f"{pattern[:100]!r}: {error}") from error
