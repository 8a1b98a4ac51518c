"""A checkpoint's files where there is no JVM to ask: in the process that commits for `format("semel")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from semel.errors import ConfigError

_STATE: Final = "state"
"""Where a query with aggregates, joins or seen keys keeps them, in its checkpoint."""


@dataclass(frozen=True, slots=True)
class PythonFiles:
    """On the driver's machine, or on a file system that pyarrow knows."""

    def read(self, path: str) -> str | None:
        if (local := _local(path)) is not None:
            try:
                return local.read_text()
            except FileNotFoundError:
                return None
        files, inner = _remote(path)
        with _told(path):
            if not _exists(files, inner):
                return None
            with files.open_input_stream(inner) as stream:
                return stream.read().decode()

    def write(self, path: str, text: str) -> None:
        if (local := _local(path)) is not None:
            local.write_text(text)
            return
        files, inner = _remote(path)
        with _told(path), files.open_output_stream(inner) as stream:
            stream.write(text.encode())

    def has_state(self, checkpoint: str) -> bool:
        path = f"{checkpoint}/{_STATE}"
        if (local := _local(path)) is not None:
            return local.is_dir()
        files, inner = _remote(path)
        with _told(path):
            return _exists(files, inner)


def _local(path: str) -> Path | None:
    """The path on this machine, if it names one.

    >>> _local("file:///data/check%20points"), _local("/data/orders"), _local("s3a://bucket/orders")
    (PosixPath('/data/check points'), PosixPath('/data/orders'), None)
    """
    parts = urlsplit(path)
    if parts.scheme == "":
        return Path(path)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None


def _remote(path: str) -> tuple[Any, str]:
    from pyarrow import fs

    # Hadoop has three names for the same buckets.
    scheme, rest = path.split("://", 1) if "://" in path else ("", path)
    known = f"s3://{rest}" if scheme in ("s3a", "s3n") else path
    try:
        return fs.FileSystem.from_uri(known)
    except Exception as error:
        raise _unreachable(path, error) from error


def _exists(files: Any, inner: str) -> bool:
    from pyarrow import fs

    return files.get_file_info(inner).type != fs.FileType.NotFound


@contextmanager
def _told(path: str) -> Iterator[None]:
    """Whatever a file system raises, as one sentence."""
    try:
        yield
    except Exception as error:
        raise _unreachable(path, error) from error


def _unreachable(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"The checkpoint at {path} cannot be read from Python on the driver ({str(error)[:200]}); nothing was written. "
        "Give pyarrow access to it, or use semel.write_stream, which reads it through Spark."
    )
