"""The README's example, run as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_readme_example_runs_and_prints_the_records_it_wrote() -> None:
    """What a newcomer copies works, and prints each of the three orders once."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"'value': b'(\d+)'", done.stdout)) == ["10", "20", "30"]
