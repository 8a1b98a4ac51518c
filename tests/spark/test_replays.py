"""What the ledger decides, against a slow model: queries that crash, restart, move and lose their checkpoints."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from semel.errors import ConfigError
from semel.spark.input_offsets import Input, InputEnd
from semel.spark.ledger import Entry
from semel.spark.options import Resume
from semel.spark.replays import Question, decide


@dataclass
class Ledger:
    """The two records of each commit."""

    by_name: dict[str, Entry] = field(default_factory=dict[str, Entry])
    by_query: dict[str, Entry] = field(default_factory=dict[str, Entry])


@dataclass
class Checkpoint:
    """What Spark keeps of one query: how far its commit log has come."""

    query: str
    committed: int = -1
    home: Ledger | None = None
    """The ledger that the sink noted in it."""


@dataclass
class World:
    """Everything that happened; `written` counts each output of each batch."""

    rng: Random
    ledgers: list[Ledger] = field(default_factory=lambda: [Ledger(), Ledger()])
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint("a"), Checkpoint("b")])
    written: Counter[tuple[str, int, str]] = field(default_factory=Counter[tuple[str, int, str]])
    refused: int = 0
    skipped: int = 0

    def run(self, checkpoint: Checkpoint, name: str, ledger: Ledger, outputs: list[str], resume: Resume | None) -> None:
        """One run of a query: some batches, then a crash somewhere, or a clean stop."""
        for number in range(self.rng.randrange(1, 4)):
            batch = checkpoint.committed + 1
            crash = self.rng.choice(["none", "none", "before", "after"])
            is_home = None if checkpoint.home is None else checkpoint.home is ledger
            asked = Question(name, batch, identity(checkpoint.query, batch, is_first=number == 0), resume, is_home)
            try:
                done = decide(asked, ledger.by_query.get(checkpoint.query), ledger.by_name.get(name))
            except ConfigError:
                self.refused += 1
                return
            checkpoint.home = ledger
            if crash == "before":
                return
            missing = [output for output in outputs if not done.has(output)]
            self.skipped += len(outputs) - len(missing)
            self.written.update((checkpoint.query, batch, output) for output in missing)
            if missing:
                entry = Entry(
                    query=checkpoint.query,
                    batch=batch,
                    offsets=f"{checkpoint.query}{batch}",
                    outputs=[*done.outputs, *missing],
                )
                ledger.by_name[name] = ledger.by_query[checkpoint.query] = entry
            if crash == "after":
                return
            checkpoint.committed = batch


class NoFiles:
    """Deciding reads no file."""

    def read(self, path: str) -> str | None:
        raise AssertionError(path)

    def write(self, path: str, text: str) -> None:
        raise AssertionError(path)


def identity(query: str, batch: int, *, is_first: bool, ends: list[InputEnd] | None = None) -> Input:
    earlier = 'v1\n{}\n{"logOffset":0}'
    return Input(query, "run", is_first, f"{query}{batch}", ends or [], "/checkpoint", NoFiles(), lambda: earlier)


@pytest.mark.parametrize("round_", range(20))
def test_no_output_is_written_twice_or_skipped_unwritten_whatever_crashes_and_moves(rng: Random, round_: int) -> None:
    """E7, E8: two queries with changing names, ledgers and outputs. Whatever is not refused is exactly-once."""
    world = World(Random(f"{rng.random()}-{round_}"))
    for _ in range(200):
        checkpoint = world.rng.choice(world.checkpoints)
        outputs = world.rng.choice([["even"], ["even", "odd"], ["odd", "other"]])
        wanted = dict.fromkeys(outputs, checkpoint.committed)
        world.run(checkpoint, world.rng.choice(["x", "y"]), world.rng.choice(world.ledgers), outputs, None)
        for output, before in wanted.items():
            for batch in range(before + 1, checkpoint.committed + 1):
                assert world.written[checkpoint.query, batch, output] >= 1, "Spark moved on without it"
    assert max(world.written.values()) == 1
    assert world.refused
    assert world.skipped


@dataclass
class Store:
    """A database: the ledger, and the rows that went with it. A backup has both."""

    ledger: Ledger = field(default_factory=Ledger)
    rows: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])

    def copy(self) -> Store:
        return Store(Ledger(dict(self.ledger.by_name), dict(self.ledger.by_query)), Counter(self.rows))


@dataclass
class Stores:
    """One database, of which backups are taken and restored while queries run and crash."""

    rng: Random
    store: Store = field(default_factory=Store)
    backup: Store = field(default_factory=Store)
    refused: int = 0
    restored: int = 0

    def upset(self) -> None:
        event = self.rng.choice(["nothing"] * 8 + ["backup", "restore"])
        if event == "backup":
            self.backup = self.store.copy()
        if event == "restore":
            self.store = self.backup.copy()
            self.restored += 1

    def run(self, checkpoint: Checkpoint, is_noted: bool) -> bool:
        """One run of a query. True once it was noted in its checkpoint where its batches are."""
        done: int | None = None
        for number in range(self.rng.randrange(1, 5)):
            self.upset()
            batch, query = checkpoint.committed + 1, checkpoint.query
            asked = Question(
                query,
                batch,
                identity(query, batch, is_first=number == 0),
                is_home=True if is_noted else None,
                is_database=True,
                done=done,
            )
            ledger = self.store.ledger
            try:
                is_written = decide(asked, ledger.by_query.get(query), ledger.by_name.get(query)).has("table")
            except ConfigError:
                self.refused += 1
                return is_noted
            is_noted = True
            crash = self.rng.choice(["none"] * 6 + ["before", "after"])
            if crash == "before":
                return is_noted
            if not is_written:
                entry = Entry(query=query, batch=batch, offsets=f"{query}{batch}", outputs=["table"])
                ledger.by_name[query] = ledger.by_query[query] = entry
                self.store.rows[query, batch] += 1
            assert all(self.store.rows[query, earlier] == 1 for earlier in range(batch + 1)), "went on over a gap"
            if crash == "after":
                return is_noted
            done = checkpoint.committed = batch
        return is_noted


@pytest.mark.parametrize("round_", range(20))
def test_a_query_does_not_go_on_over_rows_that_a_restored_database_has_lost(rng: Random, round_: int) -> None:
    """E8, F2: whenever a batch is written, all earlier ones are in the database, once; otherwise it is refused."""
    world = Stores(Random(f"{rng.random()}-{round_}"))
    noted: dict[str, bool] = {}
    checkpoints = [Checkpoint(f"q{number}") for number in range(40)]
    for _ in range(400):
        checkpoint = world.rng.choice(checkpoints)
        noted[checkpoint.query] = world.run(checkpoint, noted.get(checkpoint.query, False))
    assert world.restored
    assert world.refused
    assert max(world.store.rows.values()) == 1


def test_a_gap_in_a_database_can_be_passed_on_purpose_only() -> None:
    """E8: the rows between are missing, so the user must say that this is known."""
    mine = Entry(query="q", batch=4, offsets="q4", outputs=["out"])
    asked = Question("name", 7, identity("q", 7, is_first=True), is_home=True, is_database=True)
    with pytest.raises(ConfigError, match="knows this query up to batch 4 only"):
        decide(asked, mine, mine)
    with pytest.raises(ConfigError, match="knows this query up to batch 4 only"):
        decide(replace(asked, resume="committed"), mine, mine)
    assert not decide(replace(asked, resume="checkpoint"), mine, mine).outputs
    with pytest.raises(ConfigError, match="belongs to another database"):
        decide(replace(asked, is_home=False), mine, mine)


def test_batches_that_another_sink_may_have_written_are_not_written_again() -> None:
    """E8, C5: a checkpoint in the middle of its life that has no note of a ledger."""
    first, later = identity("q", 4, is_first=True), identity("q", 4, is_first=False)
    with pytest.raises(ConfigError, match='pass resume="checkpoint" once'):
        decide(Question("name", 4, first), None, None)
    assert not decide(Question("name", 4, first, "checkpoint"), None, None).outputs
    assert not decide(Question("name", 4, later), None, None).outputs, "only the first batch of a run can be a replay"


def test_a_query_goes_on_under_another_name() -> None:
    """E8: the entry is found by what identifies the query."""
    mine = Entry(query="q", batch=4, offsets="q4", outputs=["out"], pipeline="old name")
    assert decide(Question("new name", 4, identity("q", 4, is_first=True)), mine, None).has("out")
    assert not decide(Question("new name", 5, identity("q", 5, is_first=True)), mine, None).has("out")


def test_an_entry_of_an_older_release_stands_for_the_one_output_that_it_wrote() -> None:
    """C5: it did not name its outputs, and had one for each batch."""
    mine = Entry.decode(b'{"query": "q", "batch": 4, "offsets": "q4", "records": 7}')
    assert decide(Question("name", 4, identity("q", 4, is_first=True)), mine, mine).has("out")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([InputEnd({"in": {"0": 9}}, "c", {"in": {"0": 5}})], None),
        (
            [InputEnd({"in": {"0": 9}}, "c", {"in": {"0": 4}})],
            "was committed up to offset 5, and this query begins at 4",
        ),
        ([InputEnd({"in": {"0": 9}}, "c", {"other": {"0": 5}})], "begins at none"),
        ([InputEnd({"in": {"0": 9}})], None),  # a source that does not tell
    ],
)
def test_going_on_begins_exactly_where_the_last_batch_ended(ends: list[InputEnd], expected: str | None) -> None:
    """E8: a start before it would repeat records, a later one would lose some."""
    latest = Entry(query="lost", batch=7, outputs=["out"], ends=[InputEnd({"in": {"0": 5}}, "c")])
    asked = Question("name", 0, identity("new", 0, is_first=True, ends=ends), "committed")
    if expected is None:
        assert not decide(asked, None, latest).outputs
    else:
        with pytest.raises(ConfigError, match=expected):
            decide(asked, None, latest)
