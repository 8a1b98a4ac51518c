"""`semel verify --command`: users' own programs, right and wrong, under real kills, and what the verdict says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from semel.cli.main import app
from semel.verify.faults.kinds import FaultKind
from semel.verify.faults.plan import Cast, Worker, make_plan

PROGRAMS = Path(__file__).parent / "programs"
LOOSE = f"{sys.executable} {PROGRAMS / 'loose_copier.py'}"
CONFLUENT = f"{sys.executable} {PROGRAMS / 'confluent_copier.py'} {{bootstrap}} {{input}} {{output}}"


def verify(folder: Path, command: str, *arguments: str, outputs: tuple[str, ...] = ("invoices",)) -> Result:
    words = ["verify", "--command", command, "--input", "orders", "--json", "--seed", "7", "--folder", str(folder)]
    for output in outputs:
        words += ["--output", output]
    return CliRunner().invoke(app, [*words, "--option", "partitions=2", *arguments])


def counts(result: Result) -> dict[str, int]:
    return {one["name"]: one["count"] for one in json.loads(result.stdout)["anomalies"]}


def witness(result: Result, kind: str) -> dict[str, Any]:
    [anomaly] = [one for one in json.loads(result.stdout)["anomalies"] if one["name"] == kind]
    return anomaly["witnesses"][0]


@pytest.mark.chaos
def test_a_session_is_exactly_once_while_it_is_killed_between_its_steps(tmp_path: Path) -> None:
    """Status 0, over records that were really written and kills that really met the program."""
    copier = f"{sys.executable} {PROGRAMS / 'semel_copier.py'}"
    result = verify(tmp_path / "run", copier, "--time", "6s", "--faults", "crash=30", "--option", "patience_s=60")

    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)
    assert verdict["checked"]["records"] == verdict["checked"]["outputs"] > 500
    assert verdict["faults"]["process kills"] > 0
    assert verdict["checked"]["kills_while_writing"] > 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["lives"] > 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Exactly once." in page
    assert "semel_copier.py" in page
    assert "How long a commit takes" not in page, "nothing is known of the program's transactions"


def test_a_program_that_drops_records_is_found_with_their_places(tmp_path: Path) -> None:
    """Status 1, no fault needed; the witness and every line of the file have topic, partition, offset and key."""
    result = verify(tmp_path / "run", f"{LOOSE} drops", "--time", "2s", "--faults", "none", "--option", "patience_s=12")

    assert result.exit_code == 1, result.output
    assert counts(result).keys() == {"lost"}
    row = witness(result, "lost")["rows"][0]
    assert (row["topic"], row["key"].startswith("key-"), row["offset"] >= 0) == ("orders", True, True)
    assert "No fault within" in witness(result, "lost")["lines"][-1]
    findings = (tmp_path / "run" / "findings.jsonl").read_text().splitlines()
    assert len(findings) == counts(result)["lost"]
    assert "has no output in invoices" in (tmp_path / "run" / "report.html").read_text()


def test_a_command_that_fails_at_once_proves_nothing_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    """Status 2 within seconds, rather than a verdict over nothing."""
    began = time.monotonic()
    command = f"{sys.executable} -c \"raise SystemExit('no table orders_v2')\""
    result = verify(tmp_path / "run", command, "--faults", "worker-kill")

    said = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "keeps failing, with no fault near: exit status 1" in said
    assert "no table orders_v2" in said
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--command", "true"], "needs its topics"),
        (["--command", "true", "--input", "orders"], "needs its topics"),
        (["--command", "true", "--output", "orders"], "needs its topics"),
        (["--command", "true", "--input", "orders", "--output", "orders"], "different topics"),
        (["--command", "no-such-program", "--input", "a", "--output", "b"], "'no-such-program' was not found"),
        (["--command", "", "--input", "a", "--output", "b"], "The command is empty"),
        (["--command", "sh 'x", "--input", "a", "--output", "b"], "cannot be read"),
        (["--command", "true", "--input", "a", "--output", "b", "--rule", "sum"], "There is no rule 'sum'"),
        (["--command", "true", "--input", "a", "--output", "b", "--generator", "x"], "write MODULE:FUNCTION"),
        (["--command", "true", "--input", "a", "--output", "b", "--option", "sources=3"], "means nothing to a command"),
        (["--command", "true", "--input", "a", "--output", "b", "--option", "rate=0"], "rate=0 is no rate"),
        (["--command", "true", "--input", "a", "--output", "b", "--faults", "hijack"], "cannot be had here"),
        (["--command", "true", "--workload", "bank"], "exclude each other"),
        (["--input", "orders"], "add --command"),
        (["--rule", "key=json:dumps"], "add --command"),
    ],
)
def test_misuse_is_refused_in_one_line_before_anything_starts(tmp_path: Path, arguments: list[str], said: str) -> None:
    """Status 2, and no folder of a run that never was."""
    result = CliRunner().invoke(app, ["verify", *arguments, "--folder", str(tmp_path / "run")])

    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


def test_a_command_may_be_a_zombie_and_crash_alone_behind_the_proxy() -> None:
    """Its ids are not known, so that only a hijack is left out; with two instances nobody knows whose request it is."""
    rates = dict.fromkeys(FaultKind, 10.0)
    one = make_plan(1, rates, 60_000, Cast(workers=(Worker("command-0", may_have_transactions=True, is_alone=True),)))
    assert {left.kind for left in one.left_out} == {FaultKind.HIJACK}
    assert {fault.details["victim"] for fault in one.faults if fault.kind is FaultKind.CRASH} == {"command-0"}
    two = tuple(Worker(f"command-{n}", may_have_transactions=True) for n in range(2))
    left_out = {left.kind for left in make_plan(1, rates, 60_000, Cast(workers=two)).left_out}
    assert left_out == {FaultKind.HIJACK, FaultKind.CRASH}


def test_help_names_the_command_its_topics_and_the_statuses() -> None:
    """A new user finds there how to judge a program, and what the exit status means."""
    said = CliRunner().invoke(app, ["verify", "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    for word in ("--command", "--input", "--output", "--rule", "SEMEL_BOOTSTRAP", "{bootstrap}", "status 0", "2 if"):
        assert word in said


# Under more faults, and with more mistakes.


@pytest.mark.chaos
def test_a_transactional_copier_with_confluent_kafka_into_two_topics_is_exactly_once(tmp_path: Path) -> None:
    """A correct program of another library, with the broker killed too; a reader of that library watches."""
    arguments = ["--time", "15s", "--faults", "kill=8,worker-kill=12,crash=12,cut=40", "--client", "confluent-kafka"]
    result = verify(tmp_path / "run", CONFLUENT, *arguments, outputs=("invoices", "parcels"))

    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)
    assert 2 * verdict["checked"]["records"] == verdict["checked"]["outputs"] > 1_000
    assert verdict["faults"]["process kills"] > 3
    assert verdict["faults"]["connection cuts"] > 0


@pytest.mark.chaos
def test_a_spark_job_is_exactly_once_while_its_driver_is_killed(tmp_path: Path) -> None:
    """`write_stream` with its checkpoint in the run's folder; the JVM and Python's workers die with the driver."""
    job = f"{sys.executable} {PROGRAMS / 'spark_copier.py'}"
    result = verify(tmp_path / "run", job, "--time", "40s", "--faults", "worker-kill=3,kill=2,cut=20")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["faults"]["worker-kill"] > 0
    assert (
        "spark_copier" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )


@pytest.mark.chaos
@pytest.mark.parametrize(("mistake", "found"), [("at-least-once", "repeated"), ("at-most-once", "lost")])
def test_a_program_without_transactions_is_caught_when_it_is_killed_between_two_steps(
    tmp_path: Path, mistake: str, found: str
) -> None:
    """The kill is named beside the record."""
    arguments = ["--time", "15s", "--faults", "crash=40,worker-kill=20", "--option", "patience_s=15"]
    result = verify(tmp_path / "run", f"{LOOSE} {mistake}", *arguments)

    assert result.exit_code == 1, result.output
    assert counts(result).keys() == {found}
    assert any("fault" in row for row in witness(result, found)["rows"])
    assert "semel verify --command" in json.loads((tmp_path / "run" / "run.json").read_text())["command"]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("swaps", {"out_of_order"}),
        ("garbage", {"lost", "wrong"}),
        ("tears", {"lost", "torn"}),
        ("hangs", {"lost", "hung"}),
        ("fails", {"lost", "keeps_failing"}),
    ],
)
def test_each_mistake_has_its_own_name(tmp_path: Path, mistake: str, found: set[str]) -> None:
    """No fault is needed, and nothing else is said of the program."""
    outputs = ("invoices", "parcels") if mistake == "tears" else ("invoices",)
    arguments = ["--time", "2s", "--faults", "none", "--option", "patience_s=9"]
    result = verify(tmp_path / "run", f"{LOOSE} {mistake}", *arguments, outputs=outputs)

    assert result.exit_code == 1, result.output
    assert counts(result).keys() == found
    if mistake == "hangs":
        assert "waiting for a lock" in " ".join(witness(result, "hung")["lines"])
    if mistake == "fails":
        assert "orders_v2 does not exist" in " ".join(witness(result, "keeps_failing")["lines"])


@pytest.mark.chaos
def test_a_command_that_hangs_from_the_beginning_proves_nothing(tmp_path: Path) -> None:
    """Status 2: it is not known whether it would have been right."""
    result = verify(tmp_path / "run", "sleep 600", "--faults", "none", "--option", "patience_s=4")

    assert result.exit_code == 2
    assert "wrote nothing that is committed to invoices within 4 s" in " ".join(result.stderr.split())


@pytest.mark.chaos
def test_a_batch_job_is_started_again_and_again_and_judged_by_its_own_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends by itself; a rule of the user's says what its outputs must be, and a generator what its inputs are."""
    (tmp_path / "batch_job.py").write_text(
        "import os, semel\n"
        "if __name__ == '__main__':\n"
        "    semel.run(lambda row: row.value.upper(), by='row', to=os.environ['SEMEL_OUTPUT'], idle_ms=300,\n"
        "              bootstrap=os.environ['SEMEL_BOOTSTRAP'], group='g', topics=[os.environ['SEMEL_INPUT']],\n"
        "              name='upper', auto_offset_reset='earliest', session_timeout_ms=6000,\n"
        "              transaction_timeout_ms=5000)\n"
    )
    (tmp_path / "rules_of_batch_job.py").write_text(
        "def make(number): return f'k{number % 7}', f'value-{number}', {'n': b'1'}\n"
        "def upper(key, value): return [(key, value.upper())]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--rule", "key=rules_of_batch_job:upper", "--generator", "rules_of_batch_job:make"]
    result = verify(
        tmp_path / "run",
        f"{sys.executable} batch_job.py",
        *arguments,
        *["--time", "8s", "--faults", "worker-kill=15", "--option", "rate=20", "--option", "patience_s=60"],
    )

    assert result.exit_code == 0, result.output
    notes = " ".join(json.loads((tmp_path / "run" / "run.json").read_text())["notes"])
    assert "ended by itself" in notes


@pytest.mark.chaos
def test_a_zombie_and_its_whole_process_tree_are_stopped_and_killed(tmp_path: Path) -> None:
    """The program is a child of a shell in a session of its own: it must neither survive a kill nor the run."""
    inner = CONFLUENT.replace(sys.executable, f"setsid {sys.executable}")
    arguments = ["--faults", "worker-kill=15,zombie=6", "--time", "20s", "--option", "transaction_timeout_ms=6000"]
    result = verify(tmp_path / "run", f"sh -c '{inner} & wait'", *arguments)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["faults"]["pauses past every time-out"] > 0
    assert (
        str(PROGRAMS / "confluent_copier.py")
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    )
