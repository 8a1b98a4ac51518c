"""The public face, pinned: a name that appears or goes must be meant."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from kio.schema.errors import ErrorCode

import semel
from semel import errors

PUBLIC = {
    "Admin",
    "Broker",
    "Fetcher",
    "GroupMember",
    "KafkaSink",
    "Inbox",
    "Outcome",
    "Producer",
    "SemelError",
    "Session",
    "SharedTransaction",
    "SharedWriter",
    "TopicPartition",
    "write_batch",
    "write_stream",
    "run",
}
EXCEPTIONS = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.SemelError)
]


def test_the_public_names_are_these_and_each_can_be_had() -> None:
    """Nothing is exported by accident, and nothing is promised that cannot be imported."""
    assert set(semel.__all__) == PUBLIC
    assert {name for name in PUBLIC if getattr(semel, name).__name__ == name} == PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        _ = semel.Consumer  # type: ignore[attr-defined]


def test_importing_semel_loads_neither_arrow_nor_numpy() -> None:
    """Start-up lives in imports; what is not used is not paid for."""
    code = "import sys, semel; print(sorted({'numpy', 'pyarrow', 'kio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda kind: kind.__name__)
def test_every_exception_survives_pickling_with_what_it_carries(kind: type[errors.SemelError]) -> None:
    """It crosses Spark's processes."""
    error = kind("what happened")
    for name, value in {"code": ErrorCode.producer_fenced, "is_fatal": True}.items():
        if hasattr(error, name):
            setattr(error, name, value)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
