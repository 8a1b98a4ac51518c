"""Java and its libraries: Maven coordinates become a folder of jars, fetched once into a cache outside of the project.

The folder appears under its final name only when it is complete, and a file lock lets one process fetch while others
wait, so test runs that start at the same moment share one download.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from semel.errors import ConfigError

JAVA_VERSION_MIN = 17
FETCH_TIMEOUT_S = 900
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


def cache_folder() -> Path:
    """Where downloads are kept: `$SEMEL_CACHE`, else `$XDG_CACHE_HOME/semel`, else `~/.cache/semel`.

    >>> cache_folder().is_absolute()
    True
    """
    if chosen := os.environ.get("SEMEL_CACHE"):
        return Path(chosen).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "semel"
    return Path.home() / ".cache" / "semel"


def java_command() -> str:
    """The `java` to run: `$JAVA_HOME`'s, else the one on the path. One older than Java 17 is refused."""
    home = os.environ.get("JAVA_HOME")
    command = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if command is None:
        raise ConfigError(
            "Apache Kafka needs Java 17 or newer and no `java` was found "
            f"({'JAVA_HOME is set but has no bin/java' if home else 'not on the PATH'}): "
            "install it, for example `apt-get install openjdk-17-jdk-headless`."
        )
    if (version := _java_version(command)) < JAVA_VERSION_MIN:
        raise ConfigError(
            f"Apache Kafka needs Java 17 or newer and `{command}` is Java {version}: "
            "install a newer one, for example `apt-get install openjdk-17-jdk-headless`, or point JAVA_HOME to it."
        )
    return command


@functools.cache
def _java_version(command: str) -> int:
    answer = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    if found is None:
        raise ConfigError(f"`{command} -version` did not say which Java it is: install Java 17 or newer.")
    return int(found[1])


def jars(name: str, coordinates: Sequence[str], *, alone: bool = False) -> Path:
    """The folder `name` of the cache, with the jars of `group:artifact:version` coordinates and all they need to run.

    With `alone` it is these jars only: for a program that brings along whatever else they need. Maven is needed only
    when the folder is not there yet.
    """
    return cached_folder(name, lambda folder: (_fetch_alone if alone else _fetch)(folder, coordinates))


def cached_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache; where it is not there yet, `make` is given another one to fill."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusively(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():  # another process may have been first while this one waited
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as work:
                complete = Path(work) / "complete"
                make(complete)
                complete.rename(folder)
    return folder


@contextmanager
def _exclusively(lock_path: Path) -> Iterator[None]:
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(folder: Path, coordinates: Sequence[str]) -> None:
    pom = folder.with_name("pom.xml")
    pom.write_text(_pom(coordinates))
    goal = ["-f", str(pom), f"{PLUGIN}:copy-dependencies", "-DincludeScope=runtime"]
    _run_maven(folder, goal, ", ".join(coordinates))


def _fetch_alone(folder: Path, coordinates: Sequence[str]) -> None:
    for coordinate in coordinates:
        _run_maven(folder, [f"{PLUGIN}:copy", f"-Dartifact={coordinate}"], coordinate)


def _run_maven(folder: Path, goal: Sequence[str], wanted: str) -> None:
    command = shutil.which("mvn")
    if command is None:
        raise ConfigError(
            "Apache Kafka is fetched by Maven and no `mvn` was found on the PATH: "
            "install it, for example `apt-get install maven`."
        )
    failure = f"Maven could not fetch {wanted}; check its network settings."
    try:
        fetched = subprocess.run(
            [command, "-q", "-B", *goal, f"-DoutputDirectory={folder}"],
            capture_output=True,
            text=True,
            timeout=FETCH_TIMEOUT_S,
            check=False,
            cwd=folder.parent,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{failure} It did not end within {FETCH_TIMEOUT_S} s.") from None
    if fetched.returncode != 0 or not folder.is_dir():
        tail = "\n".join((fetched.stdout + fetched.stderr).strip().splitlines()[-8:])
        raise ConfigError(f"{failure}\n{tail}")


def _pom(coordinates: Sequence[str]) -> str:
    dependencies = ""
    for coordinate in coordinates:
        group, artifact, version = coordinate.split(":")
        dependencies += (
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
            f"<version>{version}</version></dependency>\n"
        )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>\n'
        "<groupId>semel.testing</groupId><artifactId>jars</artifactId><version>1</version>\n"
        f"<dependencies>\n{dependencies}</dependencies></project>\n"
    )
