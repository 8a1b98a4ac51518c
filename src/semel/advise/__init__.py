"""`semel.advise`: which guarantee a pipeline needs, and what is wrong with one that exists."""

from __future__ import annotations

import sys
from typing import Final

from semel.advise.examine import examine_cluster, examine_files, examine_settings
from semel.advise.program import Names, Program
from semel.advise.questions import Answers
from semel.advise.recommend import Advice, recommend
from semel.advise.rules import RULES, Finding, Rule

__all__ = [
    "RULES",
    "Advice",
    "Answers",
    "Finding",
    "Names",
    "Program",
    "Rule",
    "examine_cluster",
    "examine_files",
    "examine_settings",
    "recommend",
]

advise: Final = sys.modules[__name__]
"""For `semel.advise`, which is loaded by this name."""
