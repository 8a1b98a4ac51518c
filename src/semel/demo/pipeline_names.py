"""The two pipelines of the demo, by name. Their topics and tables are named after them."""

from __future__ import annotations

from typing import Final

PLAIN: Final = "plain"
SEMEL: Final = "semel"
PIPELINES: Final = (PLAIN, SEMEL)


def topic_of(pipeline: str, topic: str) -> str:
    """
    >>> topic_of("semel", "invoices")
    'semel-invoices'
    """
    return f"{pipeline}-{topic}"
