"""What `make compat` runs where: no test file is forgotten, no name is wrong, and no bad outcome passes for good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from compat import HERE, LEFT_OUT, VERSIONS, Outcome, choose, read_report


def planned_files() -> set[str]:
    return {test.partition("::")[0] for version in VERSIONS for tests in version.parts.values() for test in tests}


def test_every_test_file_has_its_versions_or_a_reason() -> None:
    """Which tests a version does not get is a decision, and written down."""
    assert planned_files().isdisjoint(LEFT_OUT)
    assert planned_files() | set(LEFT_OUT) == {path.name for path in HERE.glob("test_*.py")}


def test_every_test_that_is_named_exists() -> None:
    """And every test for an old pyspark is run on one."""
    planned = {test for version in VERSIONS for tests in version.parts.values() for test in tests}
    named = {test.partition("[")[0] for test in planned if "::" in test}
    for test in named:
        file, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (HERE / file).read_text(), re.MULTILINE), test
    for file in {test.partition("::")[0] for test in named}:
        tests = re.findall(r"^def (test_\w+)\(", (HERE / file).read_text(), re.MULTILINE)
        assert {f"{file}::{function}" for function in tests} <= named


def test_the_source_is_run_from_4_2_on_and_its_refusal_before() -> None:
    """E1: and sink, crashes, databases and Connect everywhere."""
    parts = {version.name: set(version.parts) for version in VERSIONS}
    everywhere = {"sink", "crashes", "databases", "connect"}
    old, new = everywhere | {"no-source"}, everywhere | {"source"}
    assert parts == {"3.5": old, "4.0": old, "4.2": new, "4.3": new}


@pytest.mark.parametrize(
    ("counts", "passed", "failed", "is_good"),
    [
        ('tests="5" failures="0" errors="0" skipped="0"', 5, 0, True),
        ('tests="5" failures="1" errors="1" skipped="0"', 3, 2, False),
        ('tests="5" failures="0" errors="0" skipped="1"', 4, 1, False),
        ('tests="0" failures="0" errors="0" skipped="0"', 0, 0, False),
        (None, 0, 0, False),
    ],
    ids=["all passed", "some failed", "one skipped", "none collected", "no report"],
)
def test_a_part_is_good_only_if_every_test_has_passed(
    tmp_path: Path, counts: str | None, passed: int, failed: int, is_good: bool
) -> None:
    """Nothing collected and anything skipped are failures."""
    report = tmp_path / "report.xml"
    if counts is not None:
        report.write_text(f"<testsuites><testsuite {counts}></testsuite></testsuites>")
    assert read_report(report) == (passed, failed)
    assert Outcome("4.0.5", "sink", passed, failed, 1.0).is_good == is_good
    assert not Outcome("4.0.5", "sink", passed, failed, 1.0, "pytest ended with 4").is_good


def test_versions_and_parts_can_be_chosen_and_a_wrong_name_is_told() -> None:
    """A mistake must not end in a run of nothing."""
    assert {part for _, part in choose(["4.0"])} == {"sink", "crashes", "databases", "no-source", "connect"}
    assert [(version.pyspark, part) for version, part in choose(["4.2:source"])] == [("4.2.1", "source")]
    assert len(choose([])) == 20
    with pytest.raises(SystemExit, match=r"There is no 4\.1 here: choose from 3\.5"):
        choose(["4.1"])
