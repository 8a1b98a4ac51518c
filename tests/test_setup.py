"""What a newcomer is told on a machine that lacks something."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
BASH = shutil.which("bash") or "/bin/bash"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the shell's own tools and nothing else."""
    for tool in ("dirname", "sed", "cat", "env"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    return tmp_path


def add_program(folder: Path, name: str, says: str) -> None:
    program = folder / name
    program.write_text(f"#!{BASH}\n{says}\n")
    program.chmod(0o755)


def run(script: str, path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BASH, str(SCRIPTS / script), *arguments],
        env={"PATH": str(path), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_missing_python_is_told_in_one_line(bare_path: Path) -> None:
    """With the command that installs it."""
    assert "Python 3.11 or newer is missing. Install it: apt-get install python3" in one_line(
        run("setup.sh", bare_path)
    )


def test_a_python_that_is_too_old_counts_as_missing(bare_path: Path) -> None:
    """It cannot run Semel; the interpreter is asked, not its name."""
    add_program(bare_path, "python3", "exit 1")
    assert "Python 3.11 or newer is missing" in one_line(run("setup.sh", bare_path))


def test_a_python_that_was_asked_for_and_does_not_do_is_not_replaced_by_another(bare_path: Path) -> None:
    """`PYTHON=python3.9 make setup` must not quietly take the newer one that is there."""
    add_program(bare_path, "python3.9", "exit 1")
    add_program(bare_path, "python3", "exit 0")
    done = run("setup.sh", bare_path, PYTHON="python3.9")
    assert "PYTHON=python3.9 is not Python 3.11 or newer." in one_line(done)


def test_a_python_is_found_by_its_version(bare_path: Path, tmp_path: Path) -> None:
    """On the PATH, or among those of pyenv, whose shim is on the PATH and fails where the version is not selected."""
    add_program(bare_path, "python3.13", "exit 127")
    kept = tmp_path / "pyenv" / "versions" / "3.13.0" / "bin"
    kept.mkdir(parents=True)
    root = str(tmp_path / "pyenv")
    assert "Python 3.13 is not installed." in one_line(run("find-python.sh", bare_path, "3.13", PYENV_ROOT=root))
    add_program(kept, "python", "exit 0")
    found = run("find-python.sh", bare_path, "3.13", PYENV_ROOT=root)
    assert found.stdout.strip() == str(kept / "python")


@pytest.mark.parametrize("says", [None, """echo 'openjdk version "11.0.2" 2019-01-15' >&2"""], ids=["none", "too old"])
def test_a_missing_java_is_told_in_one_line(bare_path: Path, says: str | None) -> None:
    """Java 11 counts as missing too."""
    if says is not None:
        add_program(bare_path, "java", says)
    assert "Java 17 or newer is missing. Install it: apt-get install openjdk-17" in one_line(
        run("need-java.sh", bare_path, "mvn")
    )


def test_a_missing_maven_is_told_in_one_line_and_a_whole_machine_in_none(bare_path: Path) -> None:
    """Only what is asked for is looked for."""
    add_program(bare_path, "java", """echo 'openjdk version "17.0.15" 2025-04-15' >&2""")
    assert "Maven's 'mvn' is missing. Install it: apt-get install maven" in one_line(
        run("need-java.sh", bare_path, "mvn")
    )
    assert run("need-java.sh", bare_path).returncode == 0


def test_the_wheel_has_everything_under_src() -> None:
    """`pyspark_semel.py` too: without it an installed Semel has no `format("semel")`."""
    root = SCRIPTS.parent
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    present = {path for path in (root / "src").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {root / path for path in wheel["packages"]} == present
