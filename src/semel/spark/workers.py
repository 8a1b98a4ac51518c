"""What Spark's Python workers do around a task, made cheap: a quarter of a second for each task otherwise.

A worker that is used again collects garbage after each task, through all modules that are loaded, and before the next
one it lets all importers read their folders anew, Spark's own archives too, with thousands of entries. Micro-batches
are short, so both were most of what Python took. Then there is the way the rows come: the JVM sends a task's function
and its first rows in two pieces. TCP holds the second one back until the first is acknowledged, and the kernel takes 40
ms for that where nothing is answered. At last, memory: rows come and go in buffers of megabytes, which the C library
gives back to the kernel and gets again, emptied page by page.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from zipimport import zipimporter

_SPARK_ARCHIVE: Final = re.compile(r"(^|/)((pyspark|py4j-[\d.]+-src)\.zip|spark-core_[^/]+\.jar)$")
_OPEN_FILES: Final = Path("/proc/self/fd")
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT_BYTES: Final = 32 * 1024 * 1024
"""What a worker may hold without using it: the rows that are encoded together, and what becomes of them."""
_KEPT_BUFFER_BYTES: Final = 16 * 1024 * 1024
_frozen_in: set[int] = set()

Batch = TypeVar("Batch")


def read_promptly(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches that Spark sends to this task, none of which waits for an acknowledgement of the one before."""
    with _local_connections() as connections:
        while True:
            _acknowledge(connections)  # it holds for a while only
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class PromptReader:
    """A base for readers that Spark sends to a task: what is sent after one does not wait for its acknowledgement."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with _local_connections() as connections:
            _acknowledge(connections)


def _acknowledge(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        with suppress(OSError):  # a socket that somebody has closed meanwhile needs none
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


@contextmanager
def _local_connections() -> Iterator[list[socket.socket]]:
    """The TCP connections of this process to others on the same machine, of which Spark's is one.

    Spark does not say which; to acknowledge at once does not hurt the others. None where the kernel knows no such wish.
    """
    found: list[socket.socket] = []
    try:
        if hasattr(socket, "TCP_QUICKACK") and _OPEN_FILES.exists():
            for entry in os.listdir(_OPEN_FILES):
                with suppress(OSError):  # a file, or closed by now
                    connection = socket.socket(fileno=int(entry))
                    found.append(connection)
        yield [connection for connection in found if _is_local(connection)]
    finally:
        for connection in found:
            connection.detach()  # the descriptor belongs to others


def _is_local(connection: socket.socket) -> bool:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return False
    try:
        return connection.getsockname()[0] == connection.getpeername()[0]
    except OSError:  # it listens, or has been closed
        return False


def ease_worker() -> None:
    """To be called at the end of a task. Harmless when repeated, and in any process."""
    for path, finder in list(sys.path_importer_cache.items()):
        # There is one for each package in an archive. Where an import asks for it, it is made again from the table of
        # contents that Python has kept.
        if isinstance(finder, zipimporter) and _SPARK_ARCHIVE.search(finder.archive):
            sys.path_importer_cache.pop(path, None)
    if os.getpid() not in _frozen_in:
        _frozen_in.add(os.getpid())
        _keep_memory()
        gc.collect()  # what is garbage now would never be freed
        gc.freeze()


def _keep_memory() -> None:
    """Let the C library use the memory of rows that are gone for the next ones, if it is one that can be told so."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BUFFER_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
