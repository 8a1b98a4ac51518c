"""Jars are fetched once, whole or not at all, and what is missing on the machine is told in one line.

`java` and `mvn` are stand-in scripts here; the real ones run in the tests of Apache Kafka itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.testing.maven import cache_folder, jars, java_command

COORDINATE = "org.example:thing:1.0"

# Notes that it ran, waits a little so that two at once would overlap, and copies its pom as the only "jar".
FAKE_MAVEN = """#!/bin/sh
echo run >> "$FAKE_MAVEN_RUNS"
sleep 0.3
for argument in "$@"; do
  case "$argument" in -DoutputDirectory=*) out="${argument#*=}";; */pom.xml) pom="$argument";; esac
done
mkdir -p "$out" && cp "$pom" "$out/thing.jar"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-in programs that come first on the PATH, and a cache of the test's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setenv("SEMEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_MAVEN_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return folder


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SEMEL_CACHE wins over XDG_CACHE_HOME, which wins over the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SEMEL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SEMEL_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "semel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "semel"


def test_jars_are_fetched_once(programs: Path, tmp_path: Path) -> None:
    """The second call finds the folder and runs no Maven; the coordinates are in what Maven was given."""
    script(programs / "mvn", FAKE_MAVEN)
    folder = jars("kafka/1.0", [COORDINATE])
    assert jars("kafka/1.0", [COORDINATE]) == folder == tmp_path / "cache" / "kafka" / "1.0"
    assert "<artifactId>thing</artifactId><version>1.0</version>" in (folder / "thing.jar").read_text()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_jars_alone_are_fetched_one_by_one(programs: Path, tmp_path: Path) -> None:
    """Each coordinate is asked for by itself, without what it depends on, and all end up in one folder."""
    fake = '#!/bin/sh\nfor one in "$@"; do case "$one" in -DoutputDirectory=*) out="${one#*=}";; '
    fake += '-Dartifact=*) artifact="${one#*=}";; esac; done\nmkdir -p "$out" && touch "$out/$artifact"\n'
    script(programs / "mvn", fake)
    folder = jars("connector/1.0", [COORDINATE, "org.example:other:2.0"], alone=True)
    assert sorted(path.name for path in folder.iterdir()) == ["org.example:other:2.0", COORDINATE]


def test_two_processes_share_one_download(programs: Path, tmp_path: Path) -> None:
    """Processes that ask at the same moment run Maven once and get the same complete folder."""
    script(programs / "mvn", FAKE_MAVEN)
    code = f"from semel.testing.maven import jars; print(len(list(jars('kafka/1.0', ['{COORDINATE}']).iterdir())))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == [b"1\n", b"1\n"]
    assert (tmp_path / "runs").read_text() == "run\n"


def test_failed_download_leaves_nothing(programs: Path, tmp_path: Path) -> None:
    """A Maven that fails half way is reported with its words, and the next call starts from nothing."""
    script(programs / "mvn", FAKE_MAVEN + "echo 'no route to repository'; exit 1\n")
    with pytest.raises(ConfigError, match=r"could not fetch org\.example:thing:1\.0(?s:.*)no route to repository"):
        jars("kafka/1.0", [COORDINATE])
    assert [path.name for path in (tmp_path / "cache" / "kafka").iterdir()] == ["1.0.lock"]
    script(programs / "mvn", FAKE_MAVEN)
    assert (jars("kafka/1.0", [COORDINATE]) / "thing.jar").exists()


def test_missing_maven_is_told_with_its_remedy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names `mvn` and how to install it."""
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ConfigError, match=r"no `mvn` was found on the PATH.*apt-get install maven"):
        jars("kafka/1.0", [COORDINATE])


def test_missing_java_is_told_with_its_remedy(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names `java`, where it was looked for, and how to install it."""
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ConfigError, match=r"no `java` was found.*PATH.*apt-get install openjdk"):
        java_command()
    monkeypatch.setenv("JAVA_HOME", str(programs))
    with pytest.raises(ConfigError, match=r"no `java` was found.*JAVA_HOME.*apt-get install openjdk"):
        java_command()


@pytest.mark.parametrize(
    ("version", "accepted"), [("1.8.0_402", False), ("11.0.2", False), ("17.0.15", True), ("25", True)]
)
def test_old_java_is_refused(programs: Path, version: str, accepted: bool) -> None:
    """Java 17 is the oldest that runs Kafka 4; the version's old and new spelling are both understood."""
    script(programs / "java", f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    if accepted:
        assert java_command() == str(programs / "java")
    else:
        with pytest.raises(ConfigError, match=r"needs Java 17 or newer and .* is Java (8|11):"):
            java_command()
