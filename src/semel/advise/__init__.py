"""`semel.advise`: which guarantee a pipeline needs, and what is wrong with one that exists."""

from __future__ import annotations

import sys
from typing import Final

from semel.advise.examine import examine_cluster, examine_files, examine_settings
from semel.advise.rules import RULES, Finding, Rule

__all__ = [
    "RULES",
    "Finding",
    "Rule",
    "examine_cluster",
    "examine_files",
    "examine_settings",
]

advise: Final = sys.modules[__name__]
"""For `semel.advise`, which is loaded by this name."""
