"""ApiVersions (18), versions 0-4: what this broker can do, and which features are agreed on.

Whether clients use transaction protocol 2 follows from the finalized feature `transaction.version`. Not done: a
`metadata.version`, since there is no quorum behind this broker.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from semel.broker.configs import BrokerSettings
from semel.broker.context import Encoded, Reply, RequestContext
from semel.wire.api import PROTOCOL_2_VERSIONS, TRANSACTION_FEATURE, TWO_PHASE_COMMIT_VERSION, Api
from semel.wire.server import SERVER_VERSIONS, respond
from semel.wire.writing import encode_entity

if TYPE_CHECKING:
    from semel.broker.state import Broker

GROUP_FEATURE: Final = "group.version"
_SUPPORTED: Final = {GROUP_FEATURE: (0, 1), TRANSACTION_FEATURE: (0, 2)}
_CONSUMER_GROUP_APIS: Final = frozenset({Api.CONSUMER_GROUP_HEARTBEAT, Api.CONSUMER_GROUP_DESCRIBE})

# Nothing here changes while the broker runs. It must not be negative: clients then take nothing as agreed on.
_FEATURES_EPOCH: Final = 1

# KIP-1022: clients of version 3 fail on a feature whose lowest version is 0, so it is kept from them.
_LOWEST_ZERO_SINCE: Final = 4

_HEAD: Final = struct.Struct(">ii")
"""The size of the frame, and its correlation id."""
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")


def handle(broker: Broker, context: RequestContext, request: Any) -> Reply:
    code = ErrorCode.none if _names_its_software(request) else ErrorCode.invalid_request
    return _answer(broker.settings, context.api_version, code, context.correlation_id)


def answer_newer_client(broker: Broker, correlation_id: int) -> Encoded:
    """To a version that is not served, in version 0: the client then asks again in one that is (KIP-511)."""
    return _answer(broker.settings, 0, ErrorCode.unsupported_version, correlation_id)


def _answer(settings: BrokerSettings, version: int, code: ErrorCode, correlation_id: int) -> Encoded:
    # The header of this answer has no tags in any version: the client does not know yet what the broker can read.
    has_two_phase_commit = settings.two_phase_commit and settings.transaction_version >= 2
    body = _body(settings.transaction_version, _has_consumer_groups(settings), has_two_phase_commit, version, code)
    return Encoded([_HEAD.pack(4 + len(body), correlation_id), body])


@cache
def _body(
    transaction_version: int, has_consumer_groups: bool, has_two_phase_commit: bool, version: int, code: ErrorCode
) -> bytes:
    """Every client begins each of its connections with this question, and the answer is always the same."""
    finalized = {TRANSACTION_FEATURE: transaction_version, GROUP_FEATURE: int(has_consumer_groups)}
    answer = respond(
        cast(Any, load_request_schema(Api.API_VERSIONS, version)),  # only its version matters
        error_code=code,
        api_keys=list(_api_keys(transaction_version, has_consumer_groups, has_two_phase_commit)),
        supported_features=[
            {"name": name, "min_version": lowest, "max_version": highest}
            for name, (lowest, highest) in _SUPPORTED.items()
            if lowest > 0 or version >= _LOWEST_ZERO_SINCE
        ],
        finalized_features_epoch=_FEATURES_EPOCH,
        finalized_features=[
            {"name": name, "max_version_level": level, "min_version_level": level}
            for name, level in sorted(finalized.items())
            if level > 0
        ],
        zk_migration_ready=False,
    )
    return encode_entity(answer)


def _api_keys(
    transaction_version: int, has_consumer_groups: bool, has_two_phase_commit: bool
) -> Iterator[Mapping[str, int]]:
    for api, served in SERVER_VERSIONS.items():
        if api in _CONSUMER_GROUP_APIS and not has_consumer_groups:
            continue
        highest = served.highest
        if transaction_version < 2 and api in PROTOCOL_2_VERSIONS:
            # As a 3.9 broker: some clients go by the version and not by the feature, and protocol 2 would break them.
            highest = min(highest, PROTOCOL_2_VERSIONS[api] - 1)
        if api is Api.INIT_PRODUCER_ID and not has_two_phase_commit:
            highest = TWO_PHASE_COMMIT_VERSION - 1  # so that clients need not ask for it to learn that it is off
        # Older librdkafka turns compression off in silence where Produce 0 is not offered (KAFKA-18659).
        lowest = 0 if api is Api.PRODUCE else served.lowest
        yield {"api_key": int(api), "min_version": lowest, "max_version": highest}


def _has_consumer_groups(settings: BrokerSettings) -> bool:
    return "consumer" in settings.group_protocols


def _names_its_software(request: Any) -> bool:
    names = (getattr(request, field, None) for field in ("client_software_name", "client_software_version"))
    return all(name is None or _SOFTWARE.fullmatch(name) for name in names)
