"""The public face, pinned: a name that appears or goes must be meant."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from kio.schema.errors import ErrorCode

import semel
from semel import errors

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "Admin",
    "Broker",
    "DatabaseSink",
    "Effects",
    "Fetcher",
    "GroupMember",
    "Kafka",
    "KafkaSink",
    "Inbox",
    "Outbox",
    "Outcome",
    "Postgres",
    "Producer",
    "ReadYourWrites",
    "Row",
    "SQLite",
    "Session",
    "SharedTransaction",
    "SharedWriter",
    "SourceInbox",
    "SourceSession",
    "TopicPartition",
    "wait_until_written",
    "write_batch",
    "write_stream",
    "apply_changes",
    "committed_offsets",
    "both",
    "both_table_sql",
    "capture",
    "is_group_mirrored",
    "mirror",
    "outbox_table_sql",
    "recover_both",
    "relay",
    "run",
}
IN_USERS_PROGRAMS = ["client", "records", "session", "spark", "wire"]
"""Packages whose code runs in a user's own process. Tools and the broker run in theirs, and print their errors."""
IN_THE_BROKER_ALONE = {"TooManyEntries"}
"""Raised while a request is read, which no client does."""


def exceptions_of_users() -> dict[str, type[errors.SemelError]]:
    for package in IN_USERS_PROGRAMS:
        folder = ROOT / "src" / "semel" / package
        for file in folder.rglob("*.py"):
            # Only those that define an exception: some modules need a pyspark newer than the oldest that is supported.
            if re.search(r"^class \w+\(.*(Error|Fenced|Aborted|Failed)", file.read_text(), re.MULTILINE):
                import_module(".".join(("semel", package, *file.relative_to(folder).with_suffix("").parts)))
    found: dict[str, type[errors.SemelError]] = {}
    waiting: list[type[errors.SemelError]] = [errors.SemelError]
    while waiting:
        kind = waiting.pop()
        waiting.extend(kind.__subclasses__())
        module = kind.__module__.split(".")
        is_users = module[0] == "semel" and module[1] in ("errors", *IN_USERS_PROGRAMS)
        if is_users and kind.__name__ not in IN_THE_BROKER_ALONE:
            found[kind.__name__] = kind
    return found


EXCEPTIONS = exceptions_of_users()


def test_the_public_names_are_these_and_each_can_be_had() -> None:
    """Nothing is exported by accident, and nothing is promised that cannot be imported."""
    assert set(semel.__all__) - set(EXCEPTIONS) == PUBLIC
    assert {name for name in semel.__all__ if getattr(semel, name).__name__ == name} == set(semel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Consumer'"):
        _ = semel.Consumer  # type: ignore[attr-defined]


def test_every_exception_that_a_user_can_meet_is_exported() -> None:
    """`except semel.WriteFailed` needs no knowledge of the package's inside. A new one goes into semel/__init__.py."""
    assert set(EXCEPTIONS) - set(semel.__all__) == set()
    assert {name: getattr(semel, name) for name in EXCEPTIONS} == EXCEPTIONS


def test_a_shell_completes_the_public_names() -> None:
    """`dir(semel)` lists what is loaded on use as well."""
    assert {*semel.__all__, "__version__"} <= set(dir(semel))


def test_the_version_is_that_of_the_package() -> None:
    """One version: in the code, in pyproject.toml, and in what is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert semel.__version__ == project["version"] == version("semel")


def test_importing_semel_loads_neither_arrow_nor_numpy() -> None:
    """Start-up lives in imports; what is not used is not paid for."""
    code = "import sys, semel; print(sorted({'numpy', 'pyarrow', 'kio', 'importlib.metadata'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", [EXCEPTIONS[name] for name in sorted(EXCEPTIONS)], ids=lambda kind: kind.__name__)
def test_every_exception_survives_pickling_with_what_it_carries(kind: type[errors.SemelError]) -> None:
    """It crosses Spark's processes."""
    error = kind("what happened")
    for name, value in {"code": ErrorCode.producer_fenced, "is_fatal": True}.items():
        if hasattr(error, name):
            setattr(error, name, value)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
