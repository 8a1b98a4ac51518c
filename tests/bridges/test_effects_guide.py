"""docs/effects.md: its programs run as a reader copies them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"(?:<!-- example: setup=(\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def test_the_programs_of_the_guide_run(tmp_path: Path) -> None:
    """K1: in the order of the page, each with its setup and its check."""
    install = ROOT / "tests" / "install"
    plan = [
        {
            "name": f"example {number}",
            "code": code,
            "setup": (install / "setups" / f"{setup}.py.txt").read_text() if setup else None,
            "continues": False,
        }
        for number, (setup, code) in enumerate(EXAMPLE.findall((ROOT / "docs" / "effects.md").read_text()))
    ]
    done = subprocess.run(
        [sys.executable, str(install / "example_runner.py")],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^ran example (\d)$", done.stdout, re.MULTILINE) == ["0", "1", "2", "3"]
    assert "2 done, 0 unknown, 0 dead\n" in done.stdout
