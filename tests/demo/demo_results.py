"""A result of the demo made by hand, for tests of what is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from semel.demo.judgement import RelayTally, TableTally, Tally
from semel.demo.pipeline_names import PLAIN, SEMEL
from semel.demo.readers import Sample
from semel.demo.run import DemoSettings, Result, Struck

CLEAN = Tally(orders=1000, windows=8, lost=0, repeated_documents=0, repeated_revenues=0, wrong=0, torn=0, cents=0)
DIRTY = replace(CLEAN, repeated_documents=137, repeated_revenues=4, torn=55, cents=12_345)
CLEAN_TABLE = TableTally(
    expected=1000, found=1000, lost=0, repeated=0, wrong=0, expected_cents=5_000_000, found_cents=5_000_000
)
DIRTY_TABLE = replace(CLEAN_TABLE, found=1093, repeated=93, found_cents=5_456_789)
CLEAN_RELAY = RelayTally(expected=1000, lost=0, repeated=0, wrong=0)


def make_result(
    plain: Tally = DIRTY,
    semel: Tally = CLEAN,
    plain_table: TableTally = DIRTY_TABLE,
    semel_table: TableTally = CLEAN_TABLE,
    relay: RelayTally = CLEAN_RELAY,
) -> Result:
    return Result(
        settings=DemoSettings(Path("somewhere"), 20.0, 7),
        tallies={PLAIN: plain, SEMEL: semel},
        table_tallies={PLAIN: plain_table, SEMEL: semel_table},
        relay_tally=relay,
        database="Postgres",
        kills=[
            Struck("driver", 4.0, "while <something> was written, 9 processes", {PLAIN: 55, SEMEL: 0}, 9.5),
            Struck("broker", 12.0, "while Semel's transaction was open"),
        ],
        samples={
            PLAIN: [Sample(3.2, 500, 0), Sample(10.1, 200, 137), Sample(15.0, 300, 0)],
            SEMEL: [Sample(3.0, 400, 0), Sample(3.4, 100, 0), Sample(11.0, 500, 0)],
        },
        fed=[(float(second), 100 * (second - 1)) for second in range(2, 12)],
        failures=Counter({PLAIN: 2}),
        seconds=20.0,
    )
