"""How much memory a process holds."""

from __future__ import annotations

from pathlib import Path


def rss_bytes(process: int | str = "self") -> int:
    """By /proc, so on Linux only.

    >>> rss_bytes() > 1_000_000
    True
    """
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {process} has no memory: has it ended?")
