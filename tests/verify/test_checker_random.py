"""The checker on thousands of random histories: no false alarm on clean ones, and every planted damage found."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from history_damages import DAMAGES, Damage, rows_of, scramble, with_rows
from little_kafka import LittleKafka
from slow_checker import SlowChecker

from semel.verify.checker import check
from semel.verify.history import History

BLOCKS = 20
IN_BLOCK = 100
SCRAMBLED = 25
TRIES = 40
PLANTED_MIN = 3
"""Some damages need what few histories have: with SEMEL_SEED=268453 two of the first forty."""


def clean_history(rng: random.Random) -> tuple[str, History]:
    seed = str(rng.getrandbits(64))
    return seed, LittleKafka(random.Random(seed)).history


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_correct_kafka_gives_no_false_alarm(rng: random.Random, block: int) -> None:
    """Aborts, unknown outcomes, killed processes and new assignments are no anomalies."""
    checked: Counter[str] = Counter()
    for _ in range(IN_BLOCK):
        seed, history = clean_history(rng)
        verdict = check(history)
        checked.update(verdict.checked)
        assert not verdict.counts.keys() - {"g0"}, f"seed {seed}: {verdict.to_json()}"
        assert verdict.is_clean
    assert min(checked.values()) > 0, checked


@pytest.mark.parametrize(("anomaly", "damage"), DAMAGES, ids=[function.__name__ for _, function in DAMAGES])
def test_a_planted_damage_is_found(rng: random.Random, anomaly: str, damage: Damage) -> None:
    """It shows as the anomaly that it is, and all else that it brings with it is what the slow checker says."""
    planted = 0
    for number in range(10 * TRIES):
        if number >= TRIES and planted >= PLANTED_MIN:
            break
        seed, history = clean_history(rng)
        rows = damage(rows_of(history), history.manifest, random.Random(seed))
        if rows is None:
            continue
        planted += 1
        damaged = with_rows(history, rows)
        counts = check(damaged, witnesses_max=1).counts
        assert anomaly in counts, f"seed {seed}: {counts}"
        assert counts == SlowChecker(damaged).run(), f"seed {seed}"
    assert planted >= PLANTED_MIN


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_scrambled_history_is_judged_as_the_slow_checker_does(rng: random.Random, block: int) -> None:
    """Rows changed without any plan: both come to the same counts of the same anomalies."""
    found: Counter[str] = Counter()
    for tried in range(20 * SCRAMBLED):
        if tried >= SCRAMBLED and len(found) >= 3:
            return
        seed, history = clean_history(rng)
        damaged = with_rows(history, scramble(rows_of(history), history.manifest, random.Random(seed)))
        counts = check(damaged, witnesses_max=1).counts
        assert counts == SlowChecker(damaged).run(), f"seed {seed}"
        found.update(counts.keys())
    pytest.fail(f"so few kinds of damage are no test: {found}")


def test_the_same_history_gives_the_same_verdict(rng: random.Random) -> None:
    """To the last witness, and however the rows are cut into parts."""
    for _ in range(20):
        seed, history = clean_history(rng)
        damaged = with_rows(history, scramble(rows_of(history), history.manifest, random.Random(seed)))
        cut = History(
            damaged.manifest, [part for rows in damaged.sources for part in np.array_split(np.asarray(rows), 3)]
        )
        assert check(damaged).to_json() == check(damaged).to_json() == check(cut).to_json(), f"seed {seed}"
