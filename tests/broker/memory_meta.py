"""Small named values in memory, as a data directory keeps them, and a disk that can be told to fail."""

from __future__ import annotations


class MemoryMeta:
    """What a crash leaves is exactly what `write_meta` returned for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.writes_until_full: int | None = None

    def read_meta(self, name: str, /) -> bytes | None:
        return self.files.get(name)

    def write_meta(self, name: str, content: bytes, /) -> None:
        if self.writes_until_full is not None:
            if self.writes_until_full == 0:
                raise OSError(28, "No space left on device")
            self.writes_until_full -= 1
        self.files[name] = content
