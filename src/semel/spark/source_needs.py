"""Which pyspark `format("semel")` needs, and the sentence that others get."""

from __future__ import annotations

import re
from typing import Final

from semel.errors import ConfigError

PYSPARK_MIN: Final = (4, 2)


def check_pyspark(version: str) -> None:
    """Refuse a pyspark that cannot hand over Arrow batches, limits and availableNow.

    >>> check_pyspark("4.2.0")
    >>> check_pyspark("4.1.1")
    Traceback (most recent call last):
        ...
    semel.errors.ConfigError: format("semel") needs pyspark 4.2 or later, and this is 4.1.1: upgrade pyspark.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < PYSPARK_MIN:
        raise ConfigError(f'format("semel") needs pyspark 4.2 or later, and this is {version}: upgrade pyspark.')
