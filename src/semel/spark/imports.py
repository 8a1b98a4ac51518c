"""What Spark's Python processes need not load: a streaming query starts one of its own and waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_hypothesis() -> Iterator[None]:
    """Let hypothesis seem not to be installed while something is imported, unless it is loaded already.

    kio makes its types known to hypothesis wherever that is installed. In a developer's environment that costs 0.15 s
    for each process that loads kio.
    """
    if "hypothesis" in sys.modules:
        yield
        return
    modules = cast(dict[str, Any], sys.modules)
    modules["hypothesis"] = None
    try:
        yield
    finally:
        del modules["hypothesis"]
