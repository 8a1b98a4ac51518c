"""The small file in a partition's directory that says where its log starts and what is known to be safely on disk."""

from __future__ import annotations

from dataclasses import dataclass

from crc32c import crc32c

from semel.broker.storage.failures import UnknownLayout
from semel.errors import CorruptRecords

CHECKPOINT_NAME = "semel-checkpoint"
LAYOUT_VERSION = 1
_OFFSETS = ("log_start_offset", "recovery_point", "first_dirty_offset")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Below `recovery_point` all files were synced, so a start does not scan them. `first_dirty_offset` is where the
    last compaction ended. `leader_epochs` are those that began below the recovery point, each with its first offset.
    """

    log_start_offset: int = 0
    recovery_point: int = 0
    first_dirty_offset: int = 0
    leader_epochs: tuple[tuple[int, int], ...] = ()

    def encode(self) -> bytes:
        """Lines of text, for people, with a checksum, for us.

        >>> print(Checkpoint(1, 2, 3, ((0, 0), (4, 1))).encode().decode(), end="")
        version 1
        log_start_offset 1
        recovery_point 2
        first_dirty_offset 3
        leader_epochs 0:0,4:1
        crc32c 024bbbf0
        """
        lines = [f"version {LAYOUT_VERSION}"]
        lines += [f"{name} {getattr(self, name)}" for name in _OFFSETS]
        lines.append("leader_epochs " + ",".join(f"{epoch}:{start}" for epoch, start in self.leader_epochs))
        body = "".join(line + "\n" for line in lines).encode()
        return body + f"crc32c {crc32c(body):08x}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Checkpoint:
        """Raises CorruptRecords for damaged bytes and UnknownLayout for those of a newer version.

        >>> Checkpoint.decode(Checkpoint(1, 2, 3).encode())
        Checkpoint(log_start_offset=1, recovery_point=2, first_dirty_offset=3, leader_epochs=())
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
        epochs = [entry.split(":") for entry in values.get("leader_epochs", "").split(",") if entry]
        return cls(
            **{name: int(values[name]) for name in _OFFSETS},
            leader_epochs=tuple((int(epoch), int(start)) for epoch, start in epochs),
        )
