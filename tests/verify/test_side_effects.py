"""Four ways to make calls side by side: what follows from the counts, and the real thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semel.cli.main import app
from semel.verify.side_effects import KILLS, RECORDS, EffectsComparison, WayShown, plan_kills

SHOWN = EffectsComparison(
    1,
    (
        WayShown("call, then commit", 40, missing=0, repeated=3, unknown=0, kills=6),
        WayShown("commit, then call", 40, missing=5, repeated=0, unknown=0, kills=6),
        WayShown("claimed, with key", 40, missing=0, repeated=0, unknown=0, kills=6),
        WayShown("claimed, without key", 40, missing=3, repeated=0, unknown=6, kills=6),
    ),
)


def changed(number: int, **counts: int) -> EffectsComparison:
    shown = list(SHOWN.shown)
    shown[number] = replace(shown[number], **counts)
    return replace(SHOWN, shown=tuple(shown))


def test_the_four_ways_do_what_they_are_known_for() -> None:
    """I2: the naive ways repeat or lose, the claimed ones keep their promises."""
    assert SHOWN.outcome == "shown"
    assert "Calling first repeated 3 calls, and committing first lost 5." in SHOWN.conclusion


@pytest.mark.parametrize(
    "broken",
    [
        changed(2, missing=1),
        changed(2, repeated=1),
        changed(2, unknown=1),
        changed(3, repeated=1),
        changed(3, missing=7),
    ],
)
def test_a_claimed_way_that_loses_or_repeats_is_not_kept(broken: EffectsComparison) -> None:
    """F4: a call that is missing and not reported as unknown counts too."""
    assert broken.outcome == "broken"
    assert broken.conclusion.startswith("Not kept: claimed, with")


@pytest.mark.parametrize("mild", [changed(0, repeated=0), changed(1, missing=0), changed(2, kills=5)])
def test_kills_that_were_too_mild_show_nothing(mild: EffectsComparison) -> None:
    """I2: the comparison can fail."""
    assert mild.outcome == "nothing"


def test_a_seed_plans_the_same_kills_again() -> None:
    """As many before a call is carried out as after it."""
    assert plan_kills(7) == plan_kills(7) != plan_kills(8)
    assert sorted(plan_kills(7).values()) == ["performed"] * (KILLS // 2) + ["received"] * (KILLS // 2)


@pytest.mark.chaos
def test_the_command_shows_all_four_with_real_processes_and_kills(tmp_path: Path) -> None:
    """F4: with the key nothing is missing, repeated or unknown; without it each kill leaves one call in doubt."""
    done = CliRunner().invoke(
        app, ["guarantees", "--effects", "--seed", "3", "--folder", str(tmp_path / "x"), "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "x" / "side-effects.json").read_text())
    called, committed, with_key, without_key = found["ways"]
    assert called["repeated"] >= KILLS // 2
    assert committed["missing"] >= KILLS // 2
    assert (with_key["missing"], with_key["repeated"], with_key["unknown"]) == (0, 0, 0)
    assert (without_key["missing"], without_key["repeated"], without_key["unknown"]) == (KILLS // 2, 0, KILLS)
    assert {way["kills"] for way in found["ways"]} == {KILLS}
    assert {way["calls"] for way in found["ways"]} == {RECORDS}
