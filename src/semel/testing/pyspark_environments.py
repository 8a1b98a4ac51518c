"""Environments with another pyspark than the one beside Semel: made from PyPI at first use, and kept in the cache.

Semel itself is not in them: whoever starts a Python there puts this very code on its path.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from semel.errors import ConfigError
from semel.testing.maven import cached_folder

SEMEL_NEEDS: Final = ("crc32c", "kio", "numpy", "prometheus-client", "pyarrow", "rich", "scramp", "typer")
"""What Semel itself depends on; there in the same versions as here, unless that pyspark needs others."""
_INSTALL_TIMEOUT_S: Final = 900


def pyspark_python(
    pyspark: str, *, extras: str = "sql", also: Sequence[str] = (), instead: Mapping[str, str] | None = None
) -> Path:
    """The Python of an environment with this version of pyspark and what Semel needs.

    `also` names packages of this environment that the other one gets too. `instead` gives versions for packages that
    cannot be there as they are here. The environment is made anew when any of these versions has changed.
    """
    needed = (*SEMEL_NEEDS, *also)
    versions = {name: version(name) for name in needed} | dict(instead or {})
    packages = (f"pyspark[{extras}]=={pyspark}", "pandas<3", *(f"{name}=={versions[name]}" for name in needed))
    mark = hashlib.sha256(repr((sys.version_info[:2], packages)).encode()).hexdigest()[:12]
    folder = cached_folder(f"pyspark/{pyspark}-{mark}", lambda folder: _install(folder, pyspark, packages))
    return folder / "bin" / "python"


def _install(folder: Path, pyspark: str, packages: Sequence[str]) -> None:
    failure = f"The environment with pyspark {pyspark} could not be made; check the network settings of pip or uv."
    for command in _commands(folder, packages):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{failure} It did not end within {_INSTALL_TIMEOUT_S} s.") from None
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
            raise ConfigError(f"{failure}\n{tail}")


def _commands(folder: Path, packages: Sequence[str]) -> Sequence[Sequence[str]]:
    """With uv where it is on the path, since it shares files between environments; else with pip."""
    python = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        return (
            [uv, "venv", "-q", "--no-python-downloads", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "-q", "--python", python, *packages],
        )
    return (
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages],
    )
