"""What the broker counts while it runs. Plain numbers: whoever wants them in Prometheus' form asks `metrics_page`."""

from __future__ import annotations

from collections import Counter

from kio.schema.errors import ErrorCode

from semel.wire.api import Api


class Metrics:
    """Counters since the start. What is not counted (open transactions, lag of the LSO) is read off the state."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.connections_opened = 0
        self.refused_connections = 0
        self.failed_logins = 0
        self.expired_logins = 0
        self.unexpected_errors = 0
        self.storage_errors = 0
        self.batches_appended = 0
        self.records_appended = 0
        self.bytes_appended = 0
        self.duplicates_refused = 0
        self.transactions_committed = 0
        self.transactions_aborted = 0
        self.transactions_timed_out = 0

    @property
    def out_of_order_sequences(self) -> int:
        return self.refusals[ErrorCode.out_of_order_sequence_number.name]

    @property
    def fences(self) -> int:
        """Requests of producers that somebody else had taken the place of."""
        return sum(
            self.refusals[code.name]
            for code in (ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch, ErrorCode.fenced_instance_id)
        )

    def count_request(self, api: Api) -> None:
        self.requests[api.name] += 1

    def count_refusal(self, code: ErrorCode) -> None:
        self.refusals[code.name] += 1

    def count_appended(self, records: int, size_bytes: int) -> None:
        self.batches_appended += 1
        self.records_appended += records
        self.bytes_appended += size_bytes

    def count_transaction(self, committed: bool) -> None:
        if committed:
            self.transactions_committed += 1
        else:
            self.transactions_aborted += 1
