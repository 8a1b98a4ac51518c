"""The small file in a partition's directory that says where its log starts and what is known to be safely on disk."""

from __future__ import annotations

from dataclasses import dataclass, fields

from crc32c import crc32c

from semel.broker.storage.failures import UnknownLayout
from semel.errors import CorruptRecords

CHECKPOINT_NAME = "semel-checkpoint"
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Below `recovery_point` all files were synced, so a start does not scan them. `first_dirty_offset` is where the
    last compaction ended.
    """

    log_start_offset: int = 0
    recovery_point: int = 0
    first_dirty_offset: int = 0

    def encode(self) -> bytes:
        """Lines of text, for people, with a checksum, for us.

        >>> print(Checkpoint(1, 2, 3).encode().decode(), end="")
        version 1
        log_start_offset 1
        recovery_point 2
        first_dirty_offset 3
        crc32c f7476c07
        """
        lines = [f"version {LAYOUT_VERSION}"]
        lines += [f"{field.name} {getattr(self, field.name)}" for field in fields(self)]
        body = "".join(line + "\n" for line in lines).encode()
        return body + f"crc32c {crc32c(body):08x}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Raises CorruptRecords for damaged bytes and UnknownLayout for those of a newer version.

        >>> Checkpoint.decode(Checkpoint(1, 2, 3).encode())
        Checkpoint(log_start_offset=1, recovery_point=2, first_dirty_offset=3)
        """
        body, _, checksum = data.rpartition(b"crc32c ")
        if checksum != f"{crc32c(body):08x}\n".encode():
            raise CorruptRecords("its checksum does not match")
        values = dict(line.split(" ", 1) for line in body.decode().splitlines())
        if int(values["version"]) > LAYOUT_VERSION:
            raise UnknownLayout(
                f"The partition was written in layout {values['version']} and this version knows up to "
                f"{LAYOUT_VERSION}. Its records are untouched: open it with the newer version of Semel."
            )
        return cls(**{field.name: int(values[field.name]) for field in fields(cls)})
