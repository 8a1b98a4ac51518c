"""Whole runs of `semel verify` on the embedded broker, small: processes are really killed, connections really cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from semel.cli.main import app
from semel.errors import ConfigError
from semel.verify.checker import check
from semel.verify.course import ensure_verdict
from semel.verify.history import Act, History, Phase
from semel.verify.run import RunSettings, run
from semel.verify.workloads.options import Options

SMALL = Options(partitions=2, sources=1, workers=2, rate=400, transaction_timeout_ms=4_000, patience_s=10)


@pytest.mark.chaos
def test_a_copier_is_exactly_once_while_brokers_and_workers_are_killed(tmp_path: Path) -> None:
    """The verdict is clean, over something; the folder has all that a report needs, and the faults were carried out."""
    told: list[str] = []
    settings = RunSettings(
        tmp_path / "run", faults="kill=20,worker-kill=20,cut=60,repeat=30", seed=11, time_s=8, options=SMALL
    )

    finished = run(settings, lambda progress: told.append(progress.stage))

    verdict = ensure_verdict(finished)
    assert verdict.is_clean, verdict.to_json()
    assert verdict.checked["records"] > 100
    assert verdict.checked["committed"] > 5
    faults = [json.loads(line) for line in (finished.folder / "faults.jsonl").read_text().splitlines()]
    assert {one["kind"] for one in faults if one["outcome"] == "done"} >= {"kill", "worker-kill", "cut"}
    assert "Exactly once." in finished.report.read_text()
    facts = json.loads((finished.folder / "run.json").read_text())
    assert facts["lives"] > 4, "who was killed lived again"
    assert "--seed 11" in facts["command"]
    assert told[-1] == "writing the report"


@pytest.mark.chaos
def test_a_record_that_is_taken_away_is_found(tmp_path: Path) -> None:
    """The same checker over the same files: a clean verdict is not all it can give."""
    finished = run(RunSettings(tmp_path / "run", workload="bank", faults="none", seed=3, time_s=2, options=SMALL))
    assert ensure_verdict(finished).is_clean
    history = History.in_folder(finished.folder)
    rows = [part.copy() for part in history.parts()]
    number = next(number for number, part in enumerate(rows) if (part["act"] == Act.ENDS).any())
    reads = (rows[number]["act"] == Act.READ) & (rows[number]["phase"] == Phase.OK)
    rows[number] = np.delete(rows[number], reads.nonzero()[0][5])  # one of those that the judge has read

    found = check(History(history.manifest, rows)).counts
    assert found.keys() & {"lost_write", "torn_transaction"}


@pytest.mark.chaos
@pytest.mark.parametrize("client", ["semel", "confluent-kafka", "kafka-python", "aiokafka"])
def test_the_command_says_what_it_found_and_ends_with_it(tmp_path: Path, client: str) -> None:
    """Exit code 0 and the JSON of the verdict, with each client by the name that the documents give it."""
    options = [f"{name}={value}" for name, value in vars(SMALL).items() if value != getattr(Options(), name)]
    arguments = ["verify", "--workload", "counters", "--faults", "none", "--seed", "5", "--time", "2s", "--json"]
    arguments += ["--client", client, "--folder", str(tmp_path / "run")]
    for option in options:
        arguments += ["--option", option]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["is_clean"] is True


@pytest.mark.conformance
def test_the_command_starts_apache_kafka_and_judges_a_run_on_it(tmp_path: Path) -> None:
    """Its broker stands still, workers die, requests are cut; the verdict is clean and tells the faults."""
    arguments = ["verify", "--target", "kafka", "--workload", "copier", "--client", "semel", "--seed", "9"]
    arguments += ["--time", "9s", "--faults", "pause=12,worker-kill=20,cut=60", "--option", "rate=300", "--json"]
    arguments += ["--folder", str(tmp_path / "run")]

    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)
    assert verdict["is_clean"] is True
    assert verdict["checked"]["committed"] > 5
    assert verdict["faults"]["pause"] > 0
    assert verdict["faults"]["process kills"] > 0
    assert verdict["faults"]["connection cuts"] > 0
    assert "Exactly once." in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "nowhere"], "The target 'nowhere' is not known"),
        (["--faults", "earthquake"], "There is no fault 'earthquake'"),
        (["--workload", "nothing"], "There is no workload 'nothing'"),
        (["--client", "nobody"], "There is no client library 'nobody'"),
        (["--time", "soon"], "is no time"),
        (["--option", "colour=red"], "is no option of a workload"),
        (["--target", "127.0.0.1:1", "--faults", "kill"], "cannot be had here"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    """Exit code 2: nothing was proved."""
    result = CliRunner().invoke(app, ["verify", *arguments, "--folder", str(tmp_path / "run")])

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_command_that_runs_it_again_names_everything_that_was_asked_for(tmp_path: Path) -> None:
    """Also the faults of another run, and only the options that are not as they are without being named."""
    settings = RunSettings(
        tmp_path,
        faults="late=60",
        seed=3,
        transaction_version=1,
        options=Options(rate=5),
        replay=Path("last run/plan.json"),
    )
    assert settings.command() == (
        "semel verify --target embedded --workload copier --client semel --seed 3 --time 60s --faults late=60 "
        "--transaction-version 1 --replay 'last run/plan.json' --option rate=5"
    )


def test_a_folder_with_another_run_in_it_is_refused(tmp_path: Path) -> None:
    """Two histories in one folder would be judged as one."""
    (tmp_path / "0.rows").write_bytes(b"")
    with pytest.raises(ConfigError, match="not empty"):
        run(RunSettings(tmp_path))
