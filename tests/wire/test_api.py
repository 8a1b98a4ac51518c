"""Version ranges and features."""

from __future__ import annotations

import pytest
from kio.index import load_request_schema, load_response_schema

from semel.errors import UnsupportedByBroker
from semel.wire import CLIENT_VERSIONS, PROTOCOL_2_VERSIONS, Api, BrokerCapabilities, VersionRange


@pytest.mark.parametrize("api", list(CLIENT_VERSIONS), ids=lambda api: api.name)
def test_every_version_in_the_clients_range_has_a_message(api: Api) -> None:
    """A version that could be negotiated can also be written and read."""
    versions = CLIENT_VERSIONS[api]
    for version in range(versions.lowest, versions.highest + 1):
        assert load_request_schema(api, version).__version__ == version
        assert load_response_schema(api, version).__version__ == version


def test_the_highest_shared_version_is_chosen() -> None:
    """Neither side is asked for more than it has."""
    capabilities = BrokerCapabilities({Api.FETCH: VersionRange(0, 11), Api.PRODUCE: VersionRange(0, 99)})
    assert capabilities.version_for(Api.FETCH) == 11
    assert capabilities.version_for(Api.PRODUCE) == 12
    assert capabilities.version_for(Api.PRODUCE, highest=PROTOCOL_2_VERSIONS[Api.PRODUCE] - 1) == 11


def test_a_broker_that_is_too_old_is_told_apart_with_what_to_do() -> None:
    """Kafka before 2.5 has no InitProducerId v3; the sentence names the version to upgrade to."""
    capabilities = BrokerCapabilities({Api.INIT_PRODUCER_ID: VersionRange(0, 1)})
    with pytest.raises(UnsupportedByBroker, match=r"InitProducerId versions 0-1.*nothing was sent.*2\.5"):
        capabilities.version_for(Api.INIT_PRODUCER_ID)
    with pytest.raises(UnsupportedByBroker, match="does not know DescribeProducers"):
        capabilities.version_for(Api.DESCRIBE_PRODUCERS)


@pytest.mark.parametrize(
    ("features", "epoch", "protocol"),
    [
        ({}, -1, 1),
        ({"transaction.version": 2}, -1, 1),
        ({"transaction.version": 1}, 3, 1),
        ({"transaction.version": 2}, 0, 2),
    ],
)
def test_protocol_2_needs_the_finalized_feature(features: dict[str, int], epoch: int, protocol: int) -> None:
    """The request versions alone say nothing: only what the cluster finalized, with a valid epoch, counts (KIP-890)."""
    everything = {int(api): VersionRange(0, 99) for api in Api}
    assert BrokerCapabilities(everything, features, epoch).transaction_protocol == protocol
