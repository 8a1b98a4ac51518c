"""Looking for the record that a broker refuses, on random tables with random bad records."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from semel.session.suspects import Suspects


@pytest.mark.parametrize("seed", range(30))
def test_every_bad_record_is_found_and_no_good_one_is_blamed(seed: int) -> None:
    """D8: transactions of any size, in order; each that has a bad record not yet known is refused as a whole."""
    chance = random.Random(seed)
    count = chance.randrange(1, 200)
    bad = {offset for offset in range(count) if chance.random() < chance.choice([0.0, 0.02, 0.5])}
    suspects, position, tries = Suspects(), 0, 0
    blamed: set[int] = set()
    while position < count:
        tries += 1
        assert tries < 20 * (len(bad) + 1) + count
        size = min(chance.randrange(1, 100), suspects.limit or count)
        offsets = list(range(position, min(count, position + size)))
        table = pa.table({"topic": ["t"] * len(offsets), "partition": [0] * len(offsets), "offset": offsets})
        good, known = suspects.split(table)
        if bad & set(good["offset"].to_pylist()):
            suspects.failed(table, ValueError("refused"))
            continue
        blamed.update(one["offset"][0].as_py() for one, _ in known)
        suspects.passed(table.num_rows)
        position += len(offsets)
    assert blamed == bad
