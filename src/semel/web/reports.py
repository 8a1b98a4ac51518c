"""Reports of `semel verify` and `semel guarantees` in a folder: what is there, and what each says.

Their contents are not trusted: anybody may have put them there, so what has not the shape of a report is left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.errors import SemelError
from semel.inspect.shown import show_text

_DEPTH_MAX: Final = 2
_ENTRIES_MAX: Final = 2_000
_LISTED_MAX: Final = 200
_JSON_BYTES_MAX: Final = 4 << 20
_HTML_BYTES_MAX: Final = 16 << 20
_WITNESSES_MAX: Final = 5
_LINES_MAX: Final = 20
_STYLE: Final = re.compile(r"<style>(.*?)</style>", re.DOTALL)
_STYLE_ATTRIBUTE: Final = re.compile(r'\sstyle="([^"]*)"')


class NoReport(SemelError):
    """There is no such report."""


@dataclass(frozen=True, slots=True)
class Report:
    """A report in the folder. `name` is its path there, of a run's folder or of a page."""

    name: str
    written_at_ms: int
    page: str | None
    """The path of its HTML page, if there is one."""
    title: str = ""
    is_clean: bool | None = None
    """None if there is a page and no verdict beside it."""
    checked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    faults: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    anomalies: list[Found] = field(default_factory=list["Found"])
    facts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@dataclass(frozen=True, slots=True)
class Found:
    """An anomaly that was looked for, with a few witnesses."""

    name: str
    definition: str
    count: int
    tolerated: str | None
    witnesses: list[list[str]]


def list_reports(folder: Path) -> list[Report]:
    """The newest first."""
    found = [*_runs(folder), *_lone_pages(folder)]
    return sorted(found, key=lambda one: (-one.written_at_ms, one.name))[:_LISTED_MAX]


def find_report(folder: Path, name: str) -> Report:
    """One that `list_reports` has listed."""
    for one in list_reports(folder):
        if one.name == name:
            return one
    raise NoReport("The folder has no such report. Nothing was read; begin at the list.")


def read_page(folder: Path, name: str) -> tuple[str, str]:
    """The page of a report, and the policy under which a browser may show it: no script, no network, its own styles."""
    report = find_report(folder, name)
    if report.page is None:
        raise NoReport("This report has no page.")
    text = _read(folder / report.page, _HTML_BYTES_MAX)
    if text is None:
        raise NoReport("The page of this report cannot be read, or is too large.")
    styles = [*_STYLE.findall(text), *_STYLE_ATTRIBUTE.findall(text)]
    hashes = " ".join(sorted({f"'sha256-{_hash(one)}'" for one in styles}))
    allowed = f"style-src 'unsafe-hashes' {hashes}" if hashes else "style-src 'none'"
    policy = f"sandbox; default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return text, policy


def _hash(style: str) -> str:
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


def _walk(folder: Path) -> Iterator[Path]:
    """Files of the folder and the folders in it. Links that lead out of it are not followed."""
    root, count = folder.resolve(), 0
    waiting = [(root, 0)]
    while waiting:
        here, depth = waiting.pop()
        try:
            entries = sorted(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            count += 1
            if count > _ENTRIES_MAX:
                return
            if entry.is_symlink():
                continue
            if entry.is_dir() and depth < _DEPTH_MAX:
                waiting.append((entry, depth + 1))
            elif entry.is_file():
                yield entry


def _runs(folder: Path) -> Iterator[Report]:
    root = folder.resolve()
    for path in _walk(folder):
        if path.name == "verdict.json":
            report = _run(root, path)
            if report is not None:
                yield report


def _lone_pages(folder: Path) -> Iterator[Report]:
    root = folder.resolve()
    for path in _walk(folder):
        if path.suffix == ".html" and not (path.parent / "verdict.json").exists():
            name = str(path.relative_to(root))
            yield Report(name, _time_of(path), name, title=path.stem)


def _run(root: Path, path: Path) -> Report | None:
    verdict, run = _object(path), _object(path.parent / "run.json") or {}
    if verdict is None or not isinstance(verdict.get("is_clean"), bool):
        return None
    page = path.parent / "report.html"
    facts = [(name, show_text(str(run[name]), 500)) for name in _FACTS if isinstance(run.get(name), str | int)]
    return Report(
        str(path.parent.relative_to(root)),
        _time_of(path),
        str(page.relative_to(root)) if page.is_file() and not page.is_symlink() else None,
        show_text(str(run.get("title") or run.get("workload") or path.parent.name)),
        verdict["is_clean"],
        _counts(verdict.get("checked")),
        _counts(verdict.get("faults")),
        [one for value in _list(verdict.get("anomalies")) if (one := _anomaly(value)) is not None],
        facts,
    )


_FACTS: Final = ("workload", "client", "target", "guarantee", "seed", "began", "command")


def _anomaly(value: Any) -> Found | None:
    if not isinstance(value, dict) or not isinstance(value.get("count"), int):
        return None
    witnesses = [
        [show_text(str(line), 500) for line in _list(one.get("lines"))[:_LINES_MAX]]
        for one in _list(value.get("witnesses"))[:_WITNESSES_MAX]
        if isinstance(one, dict)
    ]
    tolerated = value.get("tolerated")
    return Found(
        show_text(str(value.get("name"))),
        show_text(str(value.get("definition")), 500),
        value["count"],
        None if tolerated is None else show_text(str(tolerated), 500),
        witnesses,
    )


def _counts(value: Any) -> list[tuple[str, int]]:
    given = value if isinstance(value, dict) else {}
    return [(show_text(str(name)).replace("_", " "), count) for name, count in given.items() if isinstance(count, int)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(path: Path) -> dict[str, Any] | None:
    text = _read(path, _JSON_BYTES_MAX)
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _read(path: Path, bytes_max: int) -> str | None:
    try:
        if path.is_symlink() or path.stat().st_size > bytes_max:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _time_of(path: Path) -> int:
    try:
        return int(path.stat().st_mtime * 1000)
    except OSError:
        return 0
