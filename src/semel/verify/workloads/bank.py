"""Money between accounts: each move is a debit and a credit in two partitions, so that all that is visible sums to 0.

A transaction of which a reader sees one half shows as a sum that is not zero.
"""

from __future__ import annotations

import numpy as np

from semel.errors import ConfigError
from semel.verify.history import Manifest
from semel.verify.workloads.life import Life
from semel.verify.workloads.options import Options
from semel.verify.workloads.transactions import Batch, Transactions
from semel.verify.workloads.workload import Role, Workload

_AMOUNT_MAX = 1000


class Bank(Workload):
    name = "bank"
    summary = "transactions move money between accounts in different partitions: the sum is always zero"

    def __init__(self, prefix: str, options: Options | None = None) -> None:
        super().__init__(prefix, options)
        if self.options.partitions < 2:
            raise ConfigError("The bank moves money between partitions: give it at least 2.")

    def topics(self) -> dict[str, int]:
        return {f"{self.prefix}-accounts": self.options.partitions}

    def work_roles(self) -> list[Role]:
        return [Role("teller", self.options.workers, "worker")]

    def manifest(self) -> Manifest:
        return Manifest(self.partitions(), zero_sum_topics=list(self.topics()))

    def work(self, life: Life) -> None:
        transactions = Transactions(life)
        sequence = 0
        try:
            while not life.is_over:
                batch = self._moves(life, max(1, life.batch_size() // 2), sequence)
                sequence += len(batch)
                transactions.run(batch, is_to_abort=life.wants_abort())
                life.keep_pace(len(batch))
        finally:
            transactions.writer.close()

    def _moves(self, life: Life, count: int, sequence: int) -> Batch:
        accounts = self.options.partitions
        sender = life.numbers.integers(0, accounts, count)
        receiver = (sender + life.numbers.integers(1, accounts, count)) % accounts
        amount = life.numbers.integers(1, _AMOUNT_MAX, count)
        account = np.stack([sender, receiver], axis=1).reshape(-1)
        return Batch(
            partition=account.astype(np.int16),
            origin=np.full(2 * count, life.number, np.int32),
            sequence=np.arange(sequence, sequence + 2 * count, dtype=np.int32),
            value=np.stack([-amount, amount], axis=1).reshape(-1),
            key=account,
        )
