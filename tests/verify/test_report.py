"""The page that a run ends with: it says what the verdict says, shows the evidence, and cannot be broken by names."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from semel.verify.history import Act, HistoryWriter, Manifest, Phase, Process
from semel.verify.report import write_report

SECOND_NS = 1_000_000_000
VOID = {"meta", "br", "line", "rect", "circle", "polyline"}


class Outline(HTMLParser):
    """Checks that every element is closed in its turn, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def outline_of(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert not outline.open
    return outline


def leave_run(folder: Path, verdict: dict[str, Any], *, faults: int = 0) -> None:
    """A run of three seconds with one transaction."""
    Manifest([("orders", 0)], [Process(0, "writer", "writer")]).save(folder / "manifest.json")
    with HistoryWriter(folder / "0.rows", process=0) as history:
        history.note(Act.SEND, Phase.INVOKE, time_ns=0, transaction=0, partition=0)
        history.note(Act.COMMIT, Phase.INVOKE, time_ns=SECOND_NS, transaction=0)
        history.note(Act.COMMIT, Phase.OK, time_ns=2 * SECOND_NS + 1, transaction=0)
        history.note(Act.ENDS, Phase.OK, time_ns=2 * SECOND_NS + 2, partition=0, offset=3, value=5)
    run = {
        "workload": "copier",
        "client": "semel",
        "target": "<embedded>",
        "seed": 7,
        "command": "semel verify --seed 7",
        "versions": {"semel": "0.1"},
        "left_out": {"disk_full": "this broker's disk is <somebody else's>."},
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "verdict.json").write_text(json.dumps(verdict))
    lines = [
        {"kind": "kill", "outcome": "done", "begin_ns": SECOND_NS, "end_ns": 2 * SECOND_NS, "details": {"broker": n}}
        for n in range(faults)
    ]
    (folder / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def anomaly(name: str, count: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "definition": f"what {name} is", "count": count, "witnesses": [], "tolerated": None, **more}


def test_a_clean_run_says_so_and_shows_all_that_was_checked(tmp_path: Path) -> None:
    """The verdict, the figures, the faults, each anomaly by its definition, and how to run it again."""
    verdict = {"is_clean": True, "checked": {"records": 1_000}, "anomalies": []}
    leave_run(tmp_path, verdict, faults=2)

    page = write_report(tmp_path).read_text()

    text = outline_of(page).text
    for said in ("Exactly once.", "1,000 records", "lost write", "torn transaction", "semel verify --seed 7"):
        assert said in text
    assert "2 × kill" in text
    assert "this broker's disk is <somebody else's>." in text
    assert page.count("<svg") == 4


def test_a_broken_run_names_what_was_found_and_shows_the_evidence(tmp_path: Path) -> None:
    """With the rows of the history, as text and never as markup."""
    witness = {"lines": ["<b>writer 3 sent</b> orders-0", "reader saw nothing"], "rows": [{"act": "SEND", "offset": 9}]}
    found = [anomaly("torn_transaction", 12, witnesses=[witness]), anomaly("g0", 3, tolerated="Kafka allows it")]
    leave_run(tmp_path, {"is_clean": False, "checked": {}, "anomalies": found})

    page = write_report(tmp_path).read_text()

    text = outline_of(page).text
    for said in (
        "Not exactly once:",
        "12 of torn transaction",
        "<b>writer 3 sent</b> orders-0",
        "Tolerated: ",
    ):
        assert said in text
    assert '{"act": "SEND", "offset": 9}' in text
    assert "of g0" not in text, "what is tolerated is not part of the verdict"


def test_a_long_run_with_thousands_of_faults_has_a_page_of_bearable_size(tmp_path: Path) -> None:
    """What did not take a process away is a line in a chart then, and lines have no more points than a chart pixels."""
    leave_run(
        tmp_path, {"is_clean": True, "checked": {"records": 1}, "anomalies": [], "faults": {"process kills": 300}}
    )
    kinds = ["cut"] * 3_000 + ["kill", "zombie"] * 150
    long = {"api": "END_TXN", "client_id": "copier-0", "direction": "request", "nth": 1, "when": "before"}
    lines = [
        {"kind": kind, "outcome": "done", "begin_ns": n * SECOND_NS, "end_ns": n * SECOND_NS + 1, "details": long}
        for n, kind in enumerate(kinds)
    ]
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with HistoryWriter(tmp_path / "0.rows", process=0) as history:
        for second in range(4_000):
            history.note(Act.ENDS, Phase.OK, time_ns=second * SECOND_NS, partition=0, offset=3, value=5)

    path = write_report(tmp_path)

    text = outline_of(path.read_text()).text
    assert "300 process kills" in text
    assert "3,000 × cut" in text
    assert path.stat().st_size < 600_000


def test_what_the_judge_reads_at_the_end_is_not_in_the_charts(tmp_path: Path) -> None:
    """It reads everything within a second, and nothing else could be seen beside that."""
    leave_run(tmp_path, {"is_clean": True, "checked": {"records": 1}, "anomalies": []})
    Manifest([("orders", 0)], [Process(0, "writer", "writer"), Process(1, "judge", "judge")]).save(
        tmp_path / "manifest.json"
    )
    with HistoryWriter(tmp_path / "1.rows", process=1) as history:
        history.note(Act.READ, Phase.OK, time_ns=SECOND_NS, partition=0, offset=0, origin=0, sequence=0)
    assert "0records read meanwhile" in outline_of(write_report(tmp_path).read_text()).text
