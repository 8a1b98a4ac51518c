"""A small file by which a test rules a broker that runs: its text, read again only when the file has changed."""

from __future__ import annotations

import os


class ControlFile:
    """
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     control = ControlFile(f"{folder}/control")
    ...     before = control.text()
    ...     write_control(control.path, "5")
    ...     print(before, control.text(), control.version)
    None 5 1
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = 0
        """How often the file was found to be new or changed."""
        self._seen: tuple[int, int] | None = None
        self._text: str | None = None

    def text(self) -> str | None:
        """What it says now; None while there is no file."""
        try:
            status = os.stat(self.path)
            seen = (status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                with open(self.path, encoding="ascii") as file:
                    self._text = file.read().strip()
                self._seen = seen
                self.version += 1
        except FileNotFoundError:
            self._seen = self._text = None
        return self._text


def write_control(path: str, text: str) -> None:
    """Say something new in one step, so that no half of it is ever read."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(text)
    os.replace(temporary, path)
