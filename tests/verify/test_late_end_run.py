"""Whole runs that find the hole of transaction protocol 1: an EndTxn that outlives its connection ends the next one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.verify.course import Finished, ensure_verdict
from semel.verify.run import RunSettings, run
from semel.verify.workloads.options import Options

MANY_ABORTS = Options(partitions=2, workers=2, rate=1_000, batch_records_max=20, abort_fraction=0.5)


def settings_for(folder: Path, client: str, transaction_version: int, replay: Path | None = None) -> RunSettings:
    return RunSettings(
        folder,
        workload="bank",
        client=client,
        faults="late=300",
        seed=3,
        time_s=6,
        options=MANY_ABORTS,
        transaction_version=transaction_version,
        replay=replay,
    )


def late_ends(finished: Finished) -> int:
    return ensure_verdict(finished).faults.get("late", 0)


@pytest.mark.chaos
def test_late_ends_on_protocol_1_are_found_with_librdkafka_and_harm_nobody_with_semels_client(tmp_path: Path) -> None:
    """What an application aborted is read, and the witness tells it; the same plan with Semel's client is clean."""
    broken = run(settings_for(tmp_path / "librdkafka", "confluent-kafka", 1))
    found = {anomaly.name: anomaly for anomaly in ensure_verdict(broken).anomalies if anomaly.tolerated is None}
    assert late_ends(broken) > 0
    assert "aborted_read" in found, found.keys()
    assert any("aborted" in line for line in found["aborted_read"].witnesses[0].lines)

    plan = tmp_path / "librdkafka" / "plan.json"
    for version in (1, 2):
        sound = run(settings_for(tmp_path / f"semel-{version}", "semel", version, replay=plan))
        assert ensure_verdict(sound).is_clean, sound.verdict.to_json()
        assert late_ends(sound) > 0
        facts = json.loads((sound.folder / "run.json").read_text())
        assert facts["command"].endswith(f"--replay {plan} {_options()}")


def _options() -> str:
    plain = Options()
    changed = {name: value for name, value in vars(MANY_ABORTS).items() if value != getattr(plain, name)}
    return " ".join(f"--option {name}={value}" for name, value in changed.items())
