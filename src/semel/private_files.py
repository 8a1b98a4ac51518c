"""Files that hold secrets: written so that no other user can read them, and refused where another user can."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from semel.errors import ConfigError

_PRIVATE: Final = 0o600


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for `open`: a file that it makes can be read by its owner only, whatever the umask says."""
    return os.open(path, flags, _PRIVATE)


def write_private_text(path: Path, text: str) -> None:
    """Write a file that only its owner can read, also if it was there and others could."""
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), _PRIVATE)
        file.write(text)


def refuse_readable_by_all(path: str, what: str, *, consequence: str = "the broker did not start") -> None:
    """Raise ConfigError if every user of this machine can read the secrets in `path`. `what` names the file."""
    if os.stat(path).st_mode & stat.S_IROTH:
        raise ConfigError(
            f"{what} {path} can be read by everybody on this machine, so {consequence}: chmod 600 {path}."
        )
