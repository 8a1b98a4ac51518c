"""A disk of a few megabytes that a test can fill: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from semel.testing.postgres import Postgres

_NOBODY = 65534
"""Who Postgres runs as in tests that run as root."""


class SmallDisk:
    """`folder` belongs to the server. `fill` leaves next to nothing free, and `make_room` gives everything back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, *, left_bytes: int = 0) -> None:
        with self._ballast.open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(64 * 1024)):
                    pass
            except OSError:  # no space left on device
                ballast.truncate(ballast.tell() - left_bytes)

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(megabytes: int) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    folder = tempfile.mkdtemp(prefix="semel-small-disk-")
    options = f"size={megabytes}m,uid={_NOBODY},gid={_NOBODY},mode=0700"
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True
        )
        if mounted.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
        try:
            yield SmallDisk(Path(folder))
        finally:
            subprocess.run(["umount", folder], check=True)
    finally:
        os.rmdir(folder)


def move_log(server: Postgres, folder: Path) -> None:
    """Put the write-ahead log of a server elsewhere, as `initdb --waldir` does."""
    server.stop_at_once()
    log = server.folder / "data" / "pg_wal"
    shutil.copytree(log, folder)
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, log.owner(), log.group())
    shutil.rmtree(log)
    log.symlink_to(folder)
    server.start()
