"""The adviser: every combination of answers, the chart of the documents, and the command."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import semel
from semel.advise import measured
from semel.advise.program import Names, templates
from semel.advise.questions import QUESTIONS, Answers, defaults
from semel.advise.recommend import Advice, recommend
from semel.advise.rules import Finding
from semel.advise.source_check import check_source
from semel.advise.source_tree import SourceTree
from semel.cli.main import app
from semel.errors import ConfigError


def every_advice() -> list[Advice]:
    """One for each combination of answers that fits together."""
    found: list[Advice] = []
    choices = [question for question in QUESTIONS if question.choices]
    for values in itertools.product(*(question.choices for question in choices)):
        given: dict[str, Any] = dict(zip((question.name for question in choices), values, strict=True))
        if any(given[one.name] != defaults()[one.name] and not one.concerns(given) for one in choices):
            continue  # a question that nobody asks
        try:
            found.append(recommend(Answers(**given)))
        except ConfigError:
            continue  # what does not fit together: test_answers_that_do_not_fit_are_told_what_fits
    return found


ALL = every_advice()
RUFF = (sys.executable, "-m", "ruff", "check", "--isolated", "-q")


def test_every_combination_of_answers_has_an_advice_with_its_program() -> None:
    """Each says what it promises, why, what it costs, its transactional.id, and a program with what that needs."""
    assert len(ALL) > 60
    for advice in ALL:
        assert advice.promise
        assert advice.reasons
        assert advice.costs
        assert advice.transactional_id
        assert advice.before[0].startswith("pip install ")
        assert advice.programs
    assert {program.kind.partition("/")[0] for advice in ALL for program in advice.programs} == set(templates())


def test_every_program_is_whole_and_the_doctor_has_nothing_against_it() -> None:
    """It compiles, has no name that nobody defines, and keeps the rules that fit its guarantee."""
    texts = {program.text: advice for advice in ALL for program in advice.programs}
    for text in texts:
        assert "@" not in text, text
        ast.parse(text)
    for text, advice in texts.items():
        found: list[Finding] = list(check_source(SourceTree(text, "program.py")))
        allowed = {"acks-not-all", "retries-off"} if advice.guarantee == "at-most-once" else set[str]()
        assert {one.rule.id for one in found} <= allowed, (advice.answers, found)


def test_every_program_passes_a_linter(tmp_path: Path) -> None:
    """In one run of ruff, since there are many."""
    texts = sorted({program.text for advice in ALL for program in advice.programs})
    for number, text in enumerate(texts):
        (tmp_path / f"program_{number}.py").write_text(text)
    done = subprocess.run(
        [*RUFF, "--select", "F,E,W,B", "--line-length", "130", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("answers", "guarantee", "kinds"),
    [
        # The chart of the documents, from its first question to its last.
        ({"loss": "yes"}, "at-most-once", ["kafka_at_most_once"]),
        ({"duplicates": "harmless"}, "at-least-once", ["kafka_at_least_once"]),
        ({"duplicates": "harmless", "target": "postgres"}, "at-least-once", ["table_at_least_once/postgres-replace"]),
        ({"duplicates": "costly"}, "exactly-once", ["kafka_exactly_once/single"]),
        ({"target": "postgres"}, "exactly-once", ["table_exactly_once/postgres-replace"]),
        ({"target": "sqlite", "writes": "add"}, "exactly-once", ["table_exactly_once/sqlite-add"]),
        ({"target": "calls", "takes_key": "yes"}, "exactly-once", ["calls_claimed/with-key"]),
        # What it leaves out.
        ({"target": "calls"}, "at-most-once", ["calls_claimed/without-key"]),
        ({"target": "calls", "duplicates": "harmless"}, "at-least-once", ["calls_at_least_once"]),
        ({"target": "calls", "loss": "yes"}, "at-most-once", ["calls_at_most_once"]),
        ({"duplicates": "annoying"}, "exactly-once", ["kafka_exactly_once/single"]),
        ({"duplicates": "annoying", "latency_ms": 5}, "at-least-once", ["kafka_at_least_once"]),
        ({"duplicates": "costly", "latency_ms": 5}, "exactly-once", ["kafka_exactly_once/single"]),
        ({"source": "database"}, "exactly-once", ["outbox_service/postgres", "outbox_relay/postgres"]),
        ({"source": "database", "loss": "yes"}, "at-most-once", ["after_commit/postgres"]),
        ({"source": "program"}, "exactly-once", ["producer_exactly_once/single"]),
        ({"source": "program", "together": "no"}, "at-least-once", ["producer_at_least_once"]),
        ({"source": "program", "loss": "yes"}, "at-most-once", ["producer_at_most_once"]),
        ({"platform": "spark"}, "exactly-once", ["spark_stream"]),
        ({"platform": "spark", "source": "program"}, "exactly-once", ["spark_job"]),
        ({"platform": "spark", "target": "calls"}, "at-most-once", ["spark_stream", "calls_claimed/without-key"]),
        (
            {"platform": "spark", "target": "calls", "takes_key": "yes"},
            "exactly-once",
            ["spark_stream", "calls_claimed/with-key"],
        ),
    ],
)
def test_the_chart(answers: dict[str, Any], guarantee: str, kinds: list[str]) -> None:
    """From the answers to the guarantee and its program."""
    advice = recommend(**answers)
    assert advice.guarantee == guarantee
    assert [program.kind for program in advice.programs] == kinds


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"platform": "spark"}, "orders-pipeline: the pipeline's name"),
        ({"deployment": "single"}, "orders-pipeline-0, always the same"),
        ({"deployment": "indexed"}, "N from the variable INSTANCE"),
        ({"deployment": "statefulset"}, "N from the pod's name"),
        ({"target": "postgres"}, "None: .* in the database"),
        ({"duplicates": "harmless"}, "None: .* offsets of the group"),
        ({"source": "database"}, "relay's name"),
    ],
)
def test_the_transactional_id_fits_the_deployment(answers: dict[str, Any], says: str) -> None:
    """I4: for one instance, numbered ones, pods, and Spark; and where there is none."""
    assert re.search(says, recommend(**answers).transactional_id)


def test_what_the_work_and_the_latency_ask_for_is_said() -> None:
    """Numbers change the program or a caution."""
    assert 'max.poll.interval.ms": 1_200_000' in recommend(duplicates="harmless", work_s=600).programs[0].text
    assert "lease_s=240" in recommend(target="calls", takes_key="yes", work_s=120).programs[0].text
    assert any("15 minutes" in one for one in recommend(work_s=1_000).cautions)
    assert not any("15 minutes" in one for one in recommend(work_s=100).cautions)
    assert any("as long as it likes" in one for one in recommend(platform="spark", work_s=1_000).cautions)
    assert any("short for micro-batches" in one for one in recommend(platform="spark", latency_ms=50).cautions)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"platform": "flink"}, "platform='flink' is no answer: write one of service, spark"),
        ({"latency_ms": -1}, "latency_ms=-1 is no answer"),
        ({"platform": "spark", "source": "database"}, "by an outbox, not by Spark"),
        ({"source": "database", "target": "postgres"}, "into Kafka only"),
        ({"source": "program", "target": "calls"}, "nothing to read again"),
        ({"source": "program", "target": "postgres"}, "needs no Kafka"),
    ],
)
def test_answers_that_do_not_fit_are_told_what_fits(answers: dict[str, Any], says: str) -> None:
    """No advice is better than a wrong one."""
    with pytest.raises(ConfigError, match=says):
        recommend(**answers)


@pytest.mark.parametrize("names", [{"name": "a b"}, {"input": 'x"'}, {"table": "t; drop"}, {"bootstrap": "nowhere"}])
def test_a_name_that_would_break_the_program_is_refused(names: dict[str, str]) -> None:
    """What goes into the text of a program is checked, or quoted."""
    with pytest.raises(ConfigError):
        Names(**names)


def test_text_is_quoted_in_programs() -> None:
    """A URL or path may hold anything."""
    nasty = "postgresql://u:\"'\\n@name@h/d"
    text = recommend(target="postgres", names=Names(postgres=nasty)).programs[0].text
    assert nasty in {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}


def test_figures_of_this_machine_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once measured; before that, and with those of another machine, how to measure."""
    monkeypatch.setenv("SEMEL_CACHE", str(tmp_path))
    assert measured.load_figures() is None
    row = {
        "case": "embedded broker, groups of 1,000",
        "transactions / idempotent": 0.8,
        "commit p50 ms": 3.14,
        "p99 ms": 9.9,
    }
    file = measured.save_figures([row], "2026-11-19")
    told = recommend(figures=measured.load_figures()).costs
    assert "embedded broker, groups of 1,000: 80% of the throughput without transactions, commit p50 3.1 ms" in told[2]
    file.write_text(file.read_text().replace('"machine": "', '"machine": "not-'))
    assert measured.load_figures() is None
    file.write_text('{"rows": 1}')
    assert measured.load_figures() is None
    assert "semel bench transactions" in recommend().costs[1]


def test_the_function_is_public() -> None:
    """As docs/advise.md shows it."""
    advice = semel.advise.recommend(target="sqlite", writes="add")
    assert advice.guarantee == "exactly-once"


# -- the command -----------------------------------------------------------------------------------------------


def test_the_command_writes_the_program_and_never_over_another(tmp_path: Path) -> None:
    """Into a folder, with names of one's own."""
    asked = ["advise", "--target", "kafka", "--input", "carts", "--folder", str(tmp_path / "new")]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "exactly-once" in said.output
    assert 'topics=["carts"]' in (tmp_path / "new" / "pipeline.py").read_text()
    again = CliRunner().invoke(app, asked)
    assert again.exit_code == 2
    assert "is there already" in again.output


def test_the_command_prints_json(tmp_path: Path) -> None:
    """All of the advice."""
    said = CliRunner().invoke(app, ["advise", "--json", "--source", "database", "--database", "sqlite"])
    advice = json.loads(said.stdout)
    assert advice["guarantee"] == "exactly-once"
    assert [program["file"] for program in advice["programs"]] == ["service.py", "relay.py"]
    assert advice["answers"]["database"] == "sqlite"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "oracle"], "--target 'oracle' is no answer: write one of kafka, postgres"),
        (["--latency-ms", "soon"], "--latency-ms 'soon' is no number"),
        (["--source", "program", "--target", "calls"], "nothing to read again"),
        (["--table", "no table"], "no plain name of a table"),
    ],
)
def test_a_wrong_answer_is_one_sentence_and_status_2(arguments: list[str], says: str) -> None:
    """No stack trace."""
    said = CliRunner().invoke(app, ["advise", *arguments])
    assert said.exit_code == 2
    assert "No advice: " in said.output
    assert says in said.output
    assert isinstance(said.exception, SystemExit)


def test_it_asks_in_a_terminal_and_only_what_concerns_the_pipeline() -> None:
    """A real terminal: a wrong answer is asked again, numbers and beginnings of words are understood."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "semel"), "advise"],
        stdin=other,
        stdout=other,
        stderr=other,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "200"},
    )
    os.close(other)
    # platform, source, target (wrong, then right), loss, duplicates, writes, latency, work
    typed = iter(["1", "kafka", "oracle", "post", "no", "costly", "add", "", ""])
    said = b""
    answered = 0
    try:
        while True:
            try:
                said += os.read(main, 65_536)
            except OSError:  # the other end is closed
                break
            if said.count(b"> ") > answered and said.endswith(b"> "):
                answered += 1
                os.write(main, f"{next(typed)}\n".encode())
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    text = said.decode()
    assert next(typed, None) is None
    assert "'oracle' is no answer" in text
    assert "idempotency key" not in text  # no calls, no such question
    assert "exactly-once" in text
    assert 'mode="append"' in text


def test_the_bench_keeps_its_figures_for_the_adviser(
    semel_broker: semel.Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `semel bench transactions` does it, in its smallest size."""
    from semel.bench import transactions

    monkeypatch.setenv("SEMEL_CACHE", str(tmp_path))
    monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", semel_broker.bootstrap)
    section = transactions.run(sizes=(1,), seconds_a_case=0.01)
    monkeypatch.setattr("semel.cli.bench.run_sections", lambda *_, **__: [section])
    assert CliRunner().invoke(app, ["bench", "transactions"]).exit_code == 0
    costs = " ".join(recommend(figures=measured.load_figures()).costs)
    assert f"{semel_broker.bootstrap}, groups of 1: " in costs
