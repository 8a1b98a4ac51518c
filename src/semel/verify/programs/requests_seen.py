"""What a program asks its broker for, seen on the way through the proxy: which requests it makes, and its timeouts."""

from __future__ import annotations

from typing import Final

from kio.index import load_request_schema
from kio.serial import entity_reader

from semel.testing.proxy import Passage
from semel.verify.faults.plan import GROUP_REQUESTS, REQUESTS
from semel.verify.programs.settings import ProgramSettings
from semel.verify.workloads.options import Options
from semel.wire import Api

_OF_TRANSACTIONS: Final = frozenset({"END_TXN", "TXN_OFFSET_COMMIT", "ADD_PARTITIONS_TO_TXN", "ADD_OFFSETS_TO_TXN"})
_TIMEOUTS: Final = {
    Api.JOIN_GROUP: ("session.timeout.ms", "session_timeout"),
    Api.INIT_PRODUCER_ID: ("transaction.timeout.ms", "transaction_timeout"),
}
_SHARE_OF_TIME: Final = 2
"""A pause takes no more than this part of the run, or little else would happen in it."""


class RequestsSeen:
    """Call it with every request."""

    def __init__(self) -> None:
        self._api_keys: set[int] = set()
        self.timeouts_ms: dict[str, int] = {}
        """The longest of each, by the name of the client's setting."""

    def __call__(self, passage: Passage, frame: bytes) -> None:
        self._api_keys.add(passage.api_key)
        for api, (name, field) in _TIMEOUTS.items():
            if passage.api_key == api:
                self._take(name, field, passage, frame)

    def _take(self, name: str, field: str, passage: Passage, frame: bytes) -> None:
        request_type = load_request_schema(passage.api_key, passage.api_version)
        _, header_bytes = entity_reader(request_type.__header_schema__)(frame, 0)
        request, _ = entity_reader(request_type)(frame, header_bytes)
        if getattr(request, "transactional_id", "") is None:
            return  # an idempotent producer has no transaction that could time out
        timeout = getattr(request, field)
        self.timeouts_ms[name] = max(self.timeouts_ms.get(name, 0), round(timeout.total_seconds() * 1000))

    def apis(self) -> tuple[str, ...]:
        """The requests that faults wait for. Only what is certain at the first output counts: the plan must not
        depend on how far the program came by then."""
        missing = {"OFFSET_COMMIT"} if Api.END_TXN in self._api_keys else set(_OF_TRANSACTIONS)
        if Api.JOIN_GROUP not in self._api_keys:
            missing |= GROUP_REQUESTS
        return tuple(name for name in REQUESTS if name not in missing)

    def longest_timeout_ms(self, settings: ProgramSettings, options: Options) -> int:
        """What pauses must outlast: as the user says, else as the program asks for, where a run has time for it."""
        default_ms = max(options.transaction_timeout_ms, options.session_timeout_ms)
        seen_ms = max(self.timeouts_ms.values(), default=default_ms)
        is_named = bool({"transaction_timeout_ms", "session_timeout_ms"} & set(settings.options))
        return default_ms if is_named or seen_ms * _SHARE_OF_TIME > settings.time_s * 1000 else seen_ms
