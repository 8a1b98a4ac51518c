"""Three guarantees side by side: what is counted, what is told of it, what follows from it; and the real thing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hand_written import story
from test_report import outline_of
from typer.testing import CliRunner

from semel.cli.main import app
from semel.errors import ConfigError
from semel.verify.evidence import gather
from semel.verify.faults.plan import FaultPlan
from semel.verify.guarantees import Comparison, GuaranteeSettings, Shown, compare
from semel.verify.guarantees_report import conclusion, damage_times, render, write_guarantees_report
from semel.verify.history import History
from semel.verify.losses import Tally, count
from semel.verify.stories import Story, tell
from semel.verify.workloads.options import GUARANTEES, Guarantee, Options
from semel.verify.workloads.registry import make_workload

COPY = {"copies": [("orders", "copies")]}
MILLISECOND_NS = 1_000_000

LOSES = """
    w wrote orders-0@0 a0
    w wrote orders-0@1 a1
    copier-0/0 consume orders-0@0 a0 by w
    copier-0/0 position orders-0@1
    copier-0/0 send copies-0 a0
    copier-0/0 send-unknown copies-0 a0
    copier-0/0 consume orders-0@1 a1 by w
    copier-0/0 position orders-0@2
    copier-0/0 send copies-0 a1            # 8 ms
    judge read orders-0@0 a0 by w
    judge read orders-0@1 a1 by w
    judge read copies-0@0 a0 by copier-0/0
"""
REPEATS = """
    w wrote orders-0@0 a0
    copier-0/0 consume orders-0@0 a0 by w
    copier-0/0 wrote copies-0@0 a0         # 2 ms
    copier-0/1 consume orders-0@0 a0 by w
    copier-0/1 wrote copies-0@1 a0
    copier-0/1 position orders-0@1
    judge read orders-0@0 a0 by w
    judge read copies-0@0 a0 by copier-0/0
    judge read copies-0@1 a0 by copier-0/1
"""
KEEPS = """
    w wrote orders-0@0 a0
    copier-0/0 begin t0
    copier-0/0 send copies-0 a0 t0         # 2 ms
    copier-0/0 consume orders-0@0 a0 t0 by w
    copier-0/1 begin t0
    copier-0/1 send copies-0 a0 t0
    copier-0/1 consume orders-0@0 a0 t0 by w
    copier-0/1 position orders-0@1 t0
    copier-0/1 commits t0
    judge read orders-0@0 a0 by w
    judge read copies-0@2 a0 by copier-0/1 t0
"""


def fault_at(milliseconds: int, kind: str = "crash", **details: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "outcome": "done",
        "start_ns": 0,
        "begin_ns": milliseconds * MILLISECOND_NS,
        "end_ns": (milliseconds + 1) * MILLISECOND_NS,
        "note": "",
        "details": details,
    }


def crash_at(milliseconds: int, api: str, when: str, victim: str = "copier-0") -> dict[str, Any]:
    return fault_at(milliseconds, victim=victim, api=api, when=when, client_id=f"run-{victim}")


def tally_of(text: str) -> Tally:
    history = story(text, **COPY)
    return count(history, gather(history))


def told(guarantee: Guarantee, text: str, *faults: dict[str, Any]) -> str:
    history = story(text, **COPY)
    found = tell(guarantee, history, gather(history), faults)
    assert found is not None
    assert any("SEND" in line for line in found.lines)
    return found.text


# Counting


@pytest.mark.parametrize(
    ("text", "counted"),
    [(LOSES, (2, 1, 0, 0, None, 0)), (REPEATS, (1, 0, 1, 0, None, 0)), (KEEPS, (1, 0, 0, 0, 0, 1))],
)
def test_losses_and_repeats_are_counted_in_records(text: str, counted: tuple[int | None, ...]) -> None:
    """What was written in a transaction that came to nothing is neither: it is counted as undone."""
    tally = tally_of(text)
    found = (tally.input, tally.lost, tally.repeated, tally.out_of_order, tally.torn, tally.undone)
    assert found == counted


def test_an_acknowledged_copy_that_is_gone_is_one_loss() -> None:
    """The checker has two things against it, a lost write and a missing copy; the record is lost once."""
    tally = tally_of(
        """
        w wrote orders-0@0 a0
        w wrote orders-0@1 a1
        copier-0/0 consume orders-0@0 a0 by w
        copier-0/0 wrote copies-0@0 a0
        copier-0/0 wrote copies-0@1 a1
        judge read orders-0@0 a0 by w
        judge read orders-0@1 a1 by w
        judge read copies-0@1 a1 by copier-0/0
        """
    )
    assert (tally.input, tally.lost) == (2, 1)


def test_time_is_that_of_the_work_and_of_its_finished_batches() -> None:
    """From the first record of the input to the last step of a worker; a batch that was cut short has no time."""
    tally = tally_of(LOSES)
    assert tally.seconds == pytest.approx(0.008)
    assert tally.records_per_s == pytest.approx(1 / 0.008)
    assert tally.batch_ms == pytest.approx((3 + 2) / 2)
    assert tally_of(KEEPS).batch_ms == pytest.approx(4)


def test_damage_is_dated_by_when_the_record_was_in_the_input() -> None:
    """Once for each loss and each repeat, in seconds from when the faults began."""
    for text, expected in ((LOSES, [0.001]), (REPEATS, [0.0]), (KEEPS, [])):
        history = story(text, **COPY)
        assert damage_times(history, gather(history), 0) == expected


# Telling why


def test_a_loss_is_told_with_the_death_that_came_before_the_write() -> None:
    """The worker, the record, when, and the one fault of three that can have done it."""
    guilty = crash_at(9, "PRODUCE", "before")
    others = (crash_at(8, "PRODUCE", "before", "copier-1"), fault_at(8, "delay", api="FETCH", direction="request"))
    text = told("at-most-once", LOSES, *others, guilty)
    assert text.startswith("copier-0/0 took record 1 (orders-0, offset 1) at 0.01 s")
    assert "copier-0 was killed at 0.01 s, while its PRODUCE was on the way (it did not arrive)" in text


def test_a_repeat_is_told_with_both_who_wrote_it() -> None:
    """The first, what kept it from committing, and the second, which could not know."""
    text = told("at-least-once", REPEATS, crash_at(2, "OFFSET_COMMIT", "before"))
    assert "copier-0/0 wrote its copy of record 0" in text
    assert "while its OFFSET_COMMIT was on the way (it did not arrive)" in text
    assert "copier-0/1 began at the last committed position" in text


def test_what_a_transaction_undid_is_told_too() -> None:
    """The same death, and one copy."""
    text = told("exactly-once", KEEPS, crash_at(3, "PRODUCE", "after"))
    assert "in its transaction 0. Before that was committed, copier-0 was killed" in text
    assert text.endswith("Readers see one copy, at offset 2 of copies-0.")


def test_without_a_fault_near_the_story_says_so_and_without_damage_there_is_none() -> None:
    """Nothing is blamed on a fault that was over before, or came much later."""
    assert "no fault is near" in told("at-most-once", LOSES, crash_at(9_000, "PRODUCE", "before"))
    history = story(KEEPS, **COPY)
    assert tell("at-most-once", history, gather(history), []) is None


# What follows


def shown(guarantee: Guarantee, folder: Path, *, lost: int = 0, repeated: int = 0, deaths: int = 3) -> Shown:
    tally = Tally(1_000, lost, repeated, 0, 5, None, 2.0, 500.0, 4.5)
    is_clean = not lost and not repeated
    report = folder / guarantee / "report.html"
    return Shown(guarantee, tally, is_clean, {}, 9, deaths, 5, Story("<b>why</b>", ("line",)), report)


def comparison(folder: Path, *, lost: int = 7, repeated: int = 8, **exactly: int) -> Comparison:
    three = (
        shown("at-most-once", folder, lost=lost),
        shown("at-least-once", folder, repeated=repeated),
        shown("exactly-once", folder, **exactly),
    )
    return Comparison(GuaranteeSettings(folder, seed=7), three, 12, folder / "report.html")


def test_exactly_once_is_shown_only_where_the_others_fail(tmp_path: Path) -> None:
    """Faults that do nothing to the others prove nothing; a guarantee that is not kept is never called shown."""
    assert comparison(tmp_path).outcome == "shown"
    assert comparison(tmp_path, lost=0).outcome == "nothing"
    assert comparison(tmp_path, repeated=0).outcome == "nothing"
    assert comparison(tmp_path, deaths=0).outcome == "nothing"
    for broken in ({"repeated": 1}, {"lost": 1}):
        whole = comparison(tmp_path)
        assert replace(whole, shown=(*whole.shown[:2], shown("exactly-once", tmp_path, **broken))).outcome == "broken"
    whole = comparison(tmp_path)
    swapped = replace(whole, shown=(whole.shown[0], shown("at-least-once", tmp_path, lost=1), whole.shown[2]))
    assert swapped.outcome == "broken"
    assert "Not kept: at-least-once" in conclusion(swapped)


def test_three_inputs_that_differ_are_no_comparison(tmp_path: Path) -> None:
    """What was lost of one cannot be held against what was lost of another."""
    whole = comparison(tmp_path)
    other = replace(whole.shown[0], tally=replace(whole.shown[0].tally, input=999))
    assert replace(whole, shown=(other, *whole.shown[1:])).why_nothing == "the three had not the same input"


def test_the_result_for_programs_has_everything_in_the_table(tmp_path: Path) -> None:
    """Also where no batch was finished: JSON knows no nan."""
    whole = comparison(tmp_path)
    unfinished = replace(whole.shown[0], tally=replace(whole.shown[0].tally, batch_ms=float("nan")))
    result = json.loads(replace(whole, shown=(unfinished, *whole.shown[1:])).to_json())
    assert [one["guarantee"] for one in result["guarantees"]] == list(GUARANTEES)
    assert [one["tally"]["lost"] for one in result["guarantees"]] == [7, 0, 0]
    assert [one["tally"]["batch_ms"] for one in result["guarantees"]] == [None, 4.5, 4.5]
    assert (result["outcome"], result["seed"]) == ("shown", 7)


def test_the_page_says_what_the_table_says_and_links_to_the_runs(tmp_path: Path) -> None:
    """Whole HTML, in which a story is text and never markup."""
    page = render(comparison(tmp_path))
    text = outline_of(page).text
    for said in ("At most once lost 7 records, at least once repeated 8", "<b>why</b>", "semel guarantees --target"):
        assert said in text
    assert 'href="at-least-once/report.html"' in page


# Settings


def test_the_three_runs_differ_in_their_guarantee_alone(tmp_path: Path) -> None:
    """Same seed, faults and number of records, so the same plan and the same input."""
    runs = [GuaranteeSettings(tmp_path, seed=3, options={"rate": 10.0}).run_of(name) for name in GUARANTEES]
    for one in runs:
        assert replace(one.options, guarantee="exactly-once") == runs[2].options
        assert replace(one, folder=tmp_path, options=runs[0].options, apis={}) == replace(
            runs[0], folder=tmp_path, apis={}
        )
        assert list(one.apis) == list(runs[0].apis), "faults are planned for the same steps"
    assert [one.options.guarantee for one in runs] == list(GUARANTEES)
    assert runs[0].options.records == 150


def test_a_cluster_of_somebody_else_gets_no_faults_of_its_brokers(tmp_path: Path) -> None:
    """And sessions as long as brokers want them by default."""
    settings = GuaranteeSettings(tmp_path, target="broker.example:9092").run_of("exactly-once")
    assert settings.faults is not None
    assert "crash=" in settings.faults
    assert not {"kill", "pause"} & {one.split("=")[0] for one in settings.faults.split(",")}
    assert settings.options.session_timeout_ms == 6_000


def test_only_a_copier_has_a_choice_of_guarantees() -> None:
    """The others are about transactions."""
    with pytest.raises(ConfigError, match="bank cannot be at-least-once"):
        make_workload("bank", "run", Options(guarantee="at-least-once"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nowhere"], "The target 'nowhere' is not known"),
        (["--faults", "earthquake"], "There is no fault 'earthquake'"),
        (["--client", "nobody"], "There is no client library 'nobody'"),
        (["--time", "soon"], "is no time"),
        (["--option", "guarantee=exactly-once"], "is the same in every comparison"),
        (["--option", "rate=0"], "gives every run another input"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    """Exit code 2: nothing was shown."""
    result = CliRunner().invoke(app, ["guarantees", *arguments, "--folder", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_a_folder_with_another_comparison_in_it_is_refused(tmp_path: Path) -> None:
    """Its results would be mixed with these."""
    (tmp_path / "guarantees.json").write_text("{}")
    with pytest.raises(ConfigError, match="not empty"):
        compare(GuaranteeSettings(tmp_path))


# The real thing


@pytest.mark.chaos
@pytest.mark.parametrize(("client", "seed"), [("semel", 1), ("confluent-kafka", 2)])
def test_at_most_once_loses_at_least_once_repeats_and_exactly_once_does_neither(
    tmp_path: Path, client: str, seed: int
) -> None:
    """The same input and the same plan for all three, by real processes, and the checker's verdict on each."""
    whole = compare(
        GuaranteeSettings(tmp_path, client=client, seed=seed, time_s=6, faults="kill=10,worker-kill=10,crash=80,cut=30")
    )
    write_guarantees_report(whole)

    most, least, exactly = whole.shown
    assert whole.outcome == "shown", whole.to_json()
    assert most.tally.lost > 0
    assert most.tally.repeated == 0
    assert least.tally.repeated > 0
    assert least.tally.lost == 0
    assert (exactly.tally.lost, exactly.tally.repeated, exactly.is_clean) == (0, 0, True)
    assert {one.tally.input for one in whole.shown} == {6 * 800}
    plans = [FaultPlan.from_json((tmp_path / name / "plan.json").read_text()) for name in GUARANTEES]
    assert [(one.at_ms, one.kind) for one in plans[0].faults] == [(one.at_ms, one.kind) for one in plans[2].faults]
    assert all(one.story is not None and "no fault" not in one.story.text for one in (most, least))
    assert set(most.counts) == {"lost_write"}
    assert set(least.counts) == {"duplicate"}
    text = outline_of(whole.report.read_text()).text
    assert f"At most once lost {most.tally.lost:,} records" in text
    assert History.in_folder(tmp_path / "exactly-once").manifest.copies


@pytest.mark.chaos
def test_in_good_weather_nothing_is_shown(tmp_path: Path) -> None:
    """Exit code 2 and the table all the same: three pipelines that nobody disturbed are all exactly once."""
    arguments = [
        "guarantees",
        "--faults",
        "none",
        "--time",
        "2s",
        "--seed",
        "5",
        "--json",
        "--folder",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    found = json.loads(result.stdout)
    assert found["outcome"] == "nothing"
    assert {(one["tally"]["input"], one["tally"]["lost"], one["tally"]["repeated"]) for one in found["guarantees"]} == {
        (1_600, 0, 0)
    }
