"""A disk in memory for tests: it knows the page cache from what a power cut leaves, and can crash or fail at any point.

Each change (write, truncate, sync, rename, remove, create) is one operation with a number. A write that was not synced
may be there after a power cut, or not, or in part; names in a directory are lost from the newest back, as a file
system's journal does. A killed process loses nothing but the rest of the write it was in.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


class SimulatedCrash(BaseException):
    """The process died here. Not an Exception, so that no handler under test survives its own death."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list[tuple[int, bytes | None]])
    modified_ms: int = 0

    def apply(self, position: int, data: bytes | None) -> None:
        _apply(self.content, position, data)
        self.unsynced.append((position, data))

    def sync(self) -> None:
        self.durable = bytes(self.content)
        self.unsynced.clear()

    def after_power_cut(self, chance: random.Random) -> bytes:
        """What the disk holds: each unsynced change wholly, not at all, and the last one also in part."""
        content = bytearray(self.durable)
        for number, (position, data) in enumerate(self.unsynced):
            fate = chance.choice(("kept", "lost", "torn" if number + 1 == len(self.unsynced) else "kept"))
            if fate == "kept":
                _apply(content, position, data)
            elif fate == "torn" and data is not None:
                _apply(content, position, data[: chance.randrange(len(data) + 1)])
        return bytes(content)


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    """Write `data` at the position, or cut there if it is None."""
    if data is None:
        del content[position:]
        content.extend(bytes(position - len(content)))
        return
    if not data:
        return
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


_Names = dict[str, "_File | None"]  # None is a directory
_Change = tuple[str, _Names, "list[str]"]  # directory, names added, names removed


class SimulatedDisk:
    """Has the face of `semel.broker.storage.disk.Disk`.

    `crash_at` is the number of the operation in which the process dies, `fail_at` maps numbers to errno values,
    `free_bytes` is the space left, -1 for any. `operations` counts them, so that a first run tells how many there are.

    >>> disk = SimulatedDisk()
    >>> disk.make_directory("data")
    >>> disk.sync_directory("")
    >>> handle = disk.open("data/a.log", create=True)
    >>> disk.write(handle, [b"safe"], 0)
    4
    >>> disk.sync("data/a.log"); disk.sync_directory("data")
    >>> disk.write(handle, [b" or not"], 4)
    7
    >>> after = disk.reboot(power_cut=True, seed=1)
    >>> after.content("data/a.log")[:4]
    b'safe'
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        fail_at: dict[int, int] | None = None,
        free_bytes: int = -1,
        seed: int = 0,
    ) -> None:
        self.crash_at = crash_at
        self.fail_at = fail_at or {}
        self.free_bytes = free_bytes
        self.now_ms = 0
        self.operations = 0
        self.is_dead = False
        self._chance = random.Random(seed)
        self._names: _Names = {"": None}
        self._listed: dict[str, _Names] = {}
        """What is in each directory, as `_names` has it: it is asked for often, and made at the first time."""
        self._durable_names: _Names = {"": None}
        self._unsynced_names: list[_Change] = []
        self._handles: dict[int, _File] = {}
        self._next_handle = 1000

    # Faults

    def _operation(self, *, may_be_partial: bool = False) -> bool:
        """Count one change; returns whether the process dies in it, which only a write can do half-way."""
        self._check_alive()
        number = self.operations
        self.operations += 1
        if number in self.fail_at:
            code = self.fail_at[number]
            raise OSError(code, os.strerror(code))
        if number == self.crash_at:
            self.is_dead = True
            if not may_be_partial:
                raise SimulatedCrash
            return True
        return False

    def _check_alive(self) -> None:
        if self.is_dead:
            raise SimulatedCrash

    def reboot(self, *, power_cut: bool, seed: int = 0) -> SimulatedDisk:
        """The disk that the next process finds: after a power cut, or after only the process was killed."""
        after = SimulatedDisk(free_bytes=self.free_bytes)
        after.now_ms = self.now_ms
        chance = random.Random(seed)
        names = self._names_after_power_cut(chance) if power_cut else dict(self._names)
        copies: dict[_File, _File] = {}
        for path, file in names.items():
            if file is None:
                after._names[path] = None
                continue
            if file not in copies:
                content = file.after_power_cut(chance) if power_cut else bytes(file.content)
                # What the page cache holds after a kill is still not on the disk.
                durable, unsynced = (content, []) if power_cut else (file.durable, list(file.unsynced))
                copies[file] = _File(bytearray(content), durable, unsynced, file.modified_ms)
            after._names[path] = copies[file]
        if power_cut:
            after._durable_names = dict(after._names)
        else:
            after._durable_names = {p: f and copies.setdefault(f, f) for p, f in self._durable_names.items()}
            after._unsynced_names = [
                (directory, {p: f and copies.setdefault(f, f) for p, f in added.items()}, removed)
                for directory, added, removed in self._unsynced_names
            ]
        return after

    def _names_after_power_cut(self, chance: random.Random) -> _Names:
        names = dict(self._durable_names)
        lost: set[str] = set()
        for directory, added, removed in self._unsynced_names:
            if directory in lost or chance.random() < 0.2:
                lost.add(directory)  # and whatever came later in it
                continue
            _change_names(names, added, removed)
        return {path: file for path, file in names.items() if not path or _parent(path) in names}

    # For tests

    def content(self, path: str) -> bytes:
        return bytes(self._file(path).content)

    def set_content(self, path: str, content: bytes) -> None:
        """Change a file behind the back of whoever has it open, as bit rot or a person does; durably."""
        file = self._file(path)
        file.content[:] = content
        file.sync()

    def paths(self) -> list[str]:
        return sorted(path for path, file in self._names.items() if file is not None)

    # The face of Disk

    def open(self, path: str, *, create: bool = False) -> int:
        self._check_alive()
        if self._names.get(path, self) is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if path not in self._names:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self._operation()
            self._need_directory(_parent(path))
            self._rename_entries(_parent(path), {path: _File(modified_ms=self.now_ms)}, [])
        self._next_handle += 1
        self._handles[self._next_handle] = self._file(path)
        return self._next_handle

    def close(self, handle: int) -> None:
        self._check_alive()
        del self._handles[handle]

    def make_private(self, path: str) -> bool:
        return False  # it has one user

    def lock(self, path: str) -> int:
        return self.open(path, create=True)

    def read(self, handle: int, count: int, position: int) -> bytes:
        self._check_alive()
        return bytes(memoryview(self._handles[handle].content)[position : position + count])

    def write(self, handle: int, buffers: Sequence[Buffer], position: int) -> int:
        data = b"".join(buffers)
        dies = self._operation(may_be_partial=True)
        file = self._handles[handle]
        if dies:
            data = data[: self._chance.randrange(len(data) + 1)]
        if self.free_bytes >= 0:
            if self.free_bytes == 0 and data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: self.free_bytes]  # as write(2) does: what fits, and the error at the next call
            self.free_bytes -= len(data)
        file.apply(position, data)
        file.modified_ms = self.now_ms
        if dies:
            raise SimulatedCrash
        return len(data)

    def truncate(self, handle: int, size: int) -> None:
        self._operation()
        file = self._handles[handle]
        if self.free_bytes >= 0:
            self.free_bytes += max(len(file.content) - size, 0)
        file.apply(size, None)

    def sync(self, path: str) -> None:
        self._operation()
        self._file(path).sync()

    def sync_directory(self, path: str) -> None:
        self._operation()
        self._need_directory(path)
        for directory, added, removed in self._unsynced_names:
            if directory == path:
                _change_names(self._durable_names, added, removed)
        self._unsynced_names = [change for change in self._unsynced_names if change[0] != path]

    def rename(self, path: str, new_path: str) -> None:
        self._operation()
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        is_file = self._names[path] is not None
        inside = [path] if is_file else [one for one in self._names if one == path or one.startswith(path + "/")]
        added: _Names = {new_path + name[len(path) :]: self._names[name] for name in inside}
        self._rename_entries(_parent(path), added, inside)

    def remove(self, path: str) -> None:
        self._operation()
        self._file(path)
        self._rename_entries(_parent(path), {}, [path])

    def make_directory(self, path: str) -> None:
        missing = [path]
        while _parent(missing[-1]) not in self._names:
            missing.append(_parent(missing[-1]))
        for directory in reversed(missing):
            if directory not in self._names:
                self._operation()
                self._rename_entries(_parent(directory), {directory: None}, [])

    def remove_directory(self, path: str) -> None:
        self._operation()
        self._need_directory(path)
        if any(name.startswith(path + "/") for name in self._names):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._rename_entries(_parent(path), {}, [path])

    def list(self, path: str) -> list[tuple[str, bool]]:
        self._check_alive()
        self._need_directory(path)
        inside = self._listed.get(path)
        if inside is None:
            inside = self._listed[path] = {n: f for n, f in self._names.items() if n and _parent(n) == path}
        begin = len(path) + 1 if path else 0
        return [(name[begin:], file is None) for name, file in inside.items()]

    def size(self, path: str) -> int:
        self._check_alive()
        return len(self._file(path).content)

    def modified_ms(self, path: str) -> int:
        self._check_alive()
        return self._file(path).modified_ms

    def _file(self, path: str) -> _File:
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return file

    def _need_directory(self, path: str) -> None:
        if self._names.get(path, self) is not None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _rename_entries(self, directory: str, added: _Names, removed: list[str]) -> None:
        _change_names(self._names, added, removed)
        for path in removed:
            self._listed.pop(path, None)
            if (inside := self._listed.get(_parent(path))) is not None:
                inside.pop(path, None)
        for path, file in added.items():
            if (inside := self._listed.get(_parent(path))) is not None:
                inside[path] = file
        self._unsynced_names.append((directory, added, removed))


def _change_names(names: _Names, added: _Names, removed: list[str]) -> None:
    for path in removed:
        names.pop(path, None)
    names.update(added)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
