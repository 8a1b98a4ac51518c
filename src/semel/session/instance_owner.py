"""Which of several sessions with one `instance` was started last: the one that owns the `transactional.id`.

A session takes over the producer first and its place in the group later, so two that start at nearly the same time can
each win one of the two. The group's coordinator cannot tell which is newer. The transaction coordinator can.
"""

from __future__ import annotations

from semel.client.producer import Producer
from semel.client.transactions import TransactionCalls
from semel.errors import Fenced


class InstanceOwner:
    """Asks the transaction coordinator. For the session's thread, while no transaction is open."""

    def __init__(self, producer: Producer, transactional_id: str) -> None:
        self._producer = producer
        self._transactional_id = transactional_id

    def is_last_started(self) -> bool:
        """Whether no other session with this `instance` was started after this one."""
        calls = TransactionCalls(
            self._producer.cluster,
            self._transactional_id,
            self._producer.config.transaction_timeout_ms,
            self._producer.transaction_protocol,
        )
        mine = self._producer.identity
        try:
            owner = calls.owner()
        except Fenced:
            return False
        if owner is None:  # before Kafka 3.0, where only the end of a transaction is checked against the epoch
            return calls.try_end_as(mine)
        found = owner.identity
        return found.producer_id == mine.producer_id and found.producer_epoch <= mine.producer_epoch
