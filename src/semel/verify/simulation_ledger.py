"""What the simulated clients did and were told: the one side of the comparison; the logs are the other.

Every value is written once in a client's life, under the name of its transaction or of its producer, so that whatever
stands in a log can be traced back to who asked for it and what it was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TopicPartition = tuple[str, int]
Outcome = Literal["commit", "abort"]


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction of one client. `outcome` is what the markers say, `answered` what the client was told."""

    key: str
    acknowledged: dict[str, TopicPartition] = field(default_factory=dict[str, TopicPartition])
    offsets: dict[tuple[str, TopicPartition], int] = field(default_factory=dict[tuple[str, TopicPartition], int])
    is_commit_requested: bool = False
    answered: Outcome | None = None
    outcome: Outcome | None = None

    def settle(self, outcome: Outcome, where: str) -> None:
        """A marker in one of its partitions tells how it ended."""
        if self.outcome not in (None, outcome):
            raise Violation(f"{self.key} is torn: {outcome} in {where}, {self.outcome} elsewhere")
        if outcome == "commit" and not self.is_commit_requested:
            raise Violation(f"{self.key} was committed in {where}, and nobody had asked for it")
        if self.answered not in (None, outcome):
            raise Violation(f"{self.key} was answered as {self.answered}, and its marker in {where} says {outcome}")
        self.outcome = outcome


class Ledger:
    """All transactions, plain values and claims of one run."""

    def __init__(self) -> None:
        self.transactions: dict[str, Transaction] = {}
        self.plain: dict[str, TopicPartition] = {}
        """Values outside transactions that were acknowledged and may not be lost."""
        self._owners: dict[tuple[str, int, int], str] = {}
        self._assigned: dict[tuple[str, int, TopicPartition], str] = {}

    def begin(self, key: str) -> Transaction:
        transaction = self.transactions[key] = Transaction(key)
        return transaction

    def request_commit(self, transaction: Transaction, written: Mapping[str, TopicPartition]) -> None:
        """The client is about to commit all of this: if it comes about, then whole."""
        transaction.acknowledged.update(written)
        transaction.is_commit_requested = True

    def answer(self, transaction: Transaction, outcome: Outcome) -> None:
        """The client was told how its transaction ended."""
        if transaction.outcome not in (None, outcome):
            raise Violation(f"{transaction.key} is answered as {outcome}, and its markers say {transaction.outcome}")
        transaction.answered = outcome

    def claim_identity(self, transactional_id: str, producer_id: int, producer_epoch: int, client: str) -> None:
        """A client was told that it owns this epoch."""
        owner = self._owners.setdefault((transactional_id, producer_id, producer_epoch), client)
        if owner != client:
            raise Violation(
                f"{client} and {owner} both own {transactional_id}, producer id {producer_id} epoch {producer_epoch}"
            )

    def claim_partitions(
        self, group_id: str, generation_id: int, partitions: list[TopicPartition], member: str
    ) -> None:
        """A member was told that these partitions are its in this generation (or member epoch)."""
        for partition in partitions:
            owner = self._assigned.setdefault((group_id, generation_id, partition), member)
            if owner != member:
                raise Violation(
                    f"{owner} and {member} both have {partition} of {group_id} in generation {generation_id}"
                )

    def forget_generations(self) -> None:
        """Group metadata is not synced at a commit, so that the loss of power may take generations back."""
        self._assigned.clear()


def transaction_key(value: str) -> str:
    """The name of the transaction or producer that wrote a value.

    >>> transaction_key("payer.3/7")
    'payer.3'
    """
    return value.partition("/")[0]
