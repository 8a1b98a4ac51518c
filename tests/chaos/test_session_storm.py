"""A rebalance storm in CI size: sessions join, leave, are killed and are stopped past their session while they copy.

`python -m semel.verify.session_storm` is the whole, on the embedded broker or on Apache Kafka.
"""

from __future__ import annotations

import os

import pytest

from semel.broker.process import Broker
from semel.verify.session_storm import BROKER_CONFIG, Storm, run_storm

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("transaction_version", [2, 1])
@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky", "consumer"])
def test_every_record_is_copied_once_whatever_happens_to_the_members(protocol: str, transaction_version: int) -> None:
    """D1 to D5, C1, C2: nothing lost, nothing twice, offsets at the end, no transaction left open."""
    config = {**BROKER_CONFIG, "transaction.version": str(transaction_version)}
    with Broker(config=config, fsync="never") as broker:
        report = run_storm(Storm(broker.bootstrap, protocol, seed=int(os.environ["SEMEL_SEED"])))
    assert report.events == dict.fromkeys(("join", "leave", "kill", "stop"), 3)
