"""Bugs on purpose: each is planted in real code of the broker or of a client, and the checker calls it by its name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from planted_bug import Bug
from planted_bugs_of_broker import BROKER_BUGS
from planted_bugs_of_client import CLIENT_BUGS
from small_scenes import CROSSINGS, Scene, moving

from semel.verify.anomalies import ANOMALIES, TOLERATED
from semel.verify.verdict import Verdict

pytestmark = pytest.mark.chaos

BUGS = [*BROKER_BUGS, *CLIENT_BUGS]
SCENES = list({bug.scene.name: bug.scene for bug in BUGS}.values())
SETTLE_S_MAX = 2.0
"""With a bug nothing may ever settle. Without, it is known to within the time of the scene."""


def play(scene: Scene, folder: Path, bug: Bug | None = None) -> Verdict:
    with pytest.MonkeyPatch.context() as patch, scene.open(folder) as world:
        if bug is not None:
            bug.plant(patch)
        scene.play(world)
        if bug is not None and bug.side == "client":
            patch.undo()
        return world.judge(settle_s=scene.settle_s if bug is None else min(scene.settle_s, SETTLE_S_MAX))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_without_a_bug_there_is_nothing_to_find(scene: Scene, tmp_path: Path) -> None:
    """So that what is found with a bug is due to the bug: the scene is the same, and so is its seed."""
    verdict = play(scene, tmp_path)
    assert verdict.is_clean, verdict.to_json()
    assert verdict.checked["visible"] >= 4


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found_and_called_by_its_name(bug: Bug, tmp_path: Path) -> None:
    """The verdict is not clean, and has the anomaly with rows of the history that show it."""
    verdict = play(bug.scene, tmp_path, bug)
    assert not verdict.is_clean
    found = {anomaly.name: anomaly for anomaly in verdict.anomalies}
    assert set(bug.anomalies) <= found.keys(), verdict.counts
    for name in bug.anomalies:
        assert found[name].tolerated is None
        assert found[name].witnesses[0].rows


@pytest.mark.parametrize("scene", CROSSINGS, ids=lambda scene: scene.name)
def test_transactions_that_get_before_each_other_are_told_and_tolerated(scene: Scene, tmp_path: Path) -> None:
    """G0 needs no bug on Kafka: it is reported with the reason, and the verdict stays clean."""
    verdict = play(scene, tmp_path)
    [found] = verdict.anomalies
    assert found.name == "g0"
    assert found.count == 1
    assert found.tolerated == TOLERATED["g0"]
    assert "wrote before" in found.witnesses[0].lines[0]
    assert verdict.is_clean


def test_transactions_one_after_the_other_do_not_get_before_each_other(tmp_path: Path) -> None:
    """G0 is not just told of any two writers."""
    assert play(moving, tmp_path).counts == {}


def test_every_anomaly_has_three_bugs_or_more_and_both_sides_have_some() -> None:
    """Whoever adds an anomaly to the checker adds bugs that it finds."""
    ways = Counter(name for bug in BUGS for name in bug.anomalies)
    ways["g0"] = len(CROSSINGS)
    assert {anomaly.__name__: ways[anomaly.__name__] for anomaly in ANOMALIES if ways[anomaly.__name__] < 3} == {}
    assert ways.keys() == {anomaly.__name__ for anomaly in ANOMALIES}
    assert len({bug.name for bug in BUGS}) == len(BUGS)
