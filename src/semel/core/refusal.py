"""The answer "no" of a state machine: an error code for the client, and the reason for the log."""

from __future__ import annotations

from kio.schema.errors import ErrorCode


class Refused(Exception):
    """A request that is answered with an error code. Nothing was changed and nothing is to be logged.

    >>> str(Refused(ErrorCode.invalid_txn_state, "no transaction is open"))
    'invalid_txn_state: no transaction is open'
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason
