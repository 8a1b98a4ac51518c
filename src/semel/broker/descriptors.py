"""How many files and sockets the process may have open, and how many of these connections may take."""

from __future__ import annotations

from typing import Final

_FOR_FILES: Final = 512
"""The storage keeps up to 256 files open; the rest is for snapshots, listeners and whatever else the process does."""


def raise_limit() -> None:
    """Up to what the operating system allows this process, as the Java runtime does for Kafka: 1,024 are soon gone."""
    try:
        import resource  # not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_max() -> int:
    """Without a bound, clients that connect and do nothing would take the descriptors that the log needs.

    >>> connections_max() > 0
    True
    """
    try:
        import resource
    except ImportError:
        return 10_000
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1_000_000
    return max(soft - _FOR_FILES, soft // 2)
