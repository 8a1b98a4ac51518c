"""Under which identity a run of a query left its pipeline, for the next process that commits for it.

Spark has several processes that commit, and any of them may get the next micro-batch of a query. A producer of its own
in each would fence the others, and look like a second run. So the one that has committed notes its identity, and the
next goes on under it; another run knows nothing of the note, and fences them all.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from semel.client.ownership import ProducerIdentity
from semel.errors import SemelError
from semel.private_files import write_private_text

_FOLDER: Final = "semel-runs-"
_KEPT_S: Final = 30 * 24 * 3600
"""After so long without a micro-batch a note is removed. The run takes the pipeline over again then, as a new one."""


class RunNote:
    """The note of one run of a query, about one pipeline."""

    def __init__(self, run: str, pipeline: str, bootstrap: str) -> None:
        named = sha256(json.dumps([run, pipeline, bootstrap]).encode()).hexdigest()[:32]
        self._path = _folder() / f"{named}.json"

    def read(self) -> ProducerIdentity | None:
        """None before the first micro-batch of the run."""
        try:
            return ProducerIdentity(*json.loads(self._path.read_text()))
        except FileNotFoundError:
            return None

    def write(self, identity: ProducerIdentity) -> None:
        if not self._path.exists():
            _remove_old(self._path.parent)
        draft = self._path.with_suffix(".draft")
        write_private_text(draft, json.dumps(identity))
        draft.replace(self._path)


def _folder() -> Path:
    """A folder of this user's own among the temporary files."""
    folder = Path(tempfile.gettempdir()) / f"{_FOLDER}{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SemelError(
            f"{folder} is not a folder of this user's alone, so the run cannot be noted there; nothing was written. "
            "Remove it, or set TMPDIR for the driver."
        )
    return folder


def _remove_old(folder: Path) -> None:
    for note in folder.iterdir():
        with suppress(FileNotFoundError):  # another process is at the same work
            if time.time() - note.stat().st_mtime > _KEPT_S:
                note.unlink()
