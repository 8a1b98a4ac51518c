"""The examples run, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from session_scene import BROKER_CONFIG, Pipeline, wait_until

from semel.broker.process import Broker
from semel.processes import spawn

EXAMPLES = Path(__file__).parents[2] / "examples"


def code_lines(file: Path) -> list[str]:
    """Without the docstring, empty lines and imports."""
    code = file.read_text().split('"""')[2]
    return [line for line in code.splitlines() if line.strip() and not line.startswith("import ")]


def test_the_exactly_once_processor_takes_ten_lines_and_survives_being_killed(tmp_path: Path) -> None:
    """Bar 6: killed in the middle and started again, every message is answered once."""
    program = EXAMPLES / "exactly_once_processor.py"
    assert len(code_lines(program)) <= 10
    with Broker(config=BROKER_CONFIG, fsync="never") as broker:
        pipeline = Pipeline(broker.bootstrap)
        command = [sys.executable, str(program), broker.bootstrap, pipeline.source, pipeline.target, "0"]
        for first in (0, 500):
            pipeline.write(range(first, first + 500))
            process = spawn(command, folder=tmp_path, output=tmp_path / "log")
            try:
                wait_until(lambda first=first: len(pipeline.read()) >= first + 500, (tmp_path / "log").read_text(), 60)
            finally:
                process.kill()
                process.wait()
        values = Counter(row["value"] for row in pipeline.read())
    assert values == Counter(f"{number}-ok".encode() for number in range(1_000))


def test_the_program_in_the_guide_runs() -> None:
    """docs/session.md begins with one that needs nothing but Semel."""
    guide = (EXAMPLES.parent / "docs" / "session.md").read_text()
    first = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", first], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"2 records in \d transactions\n", done.stdout)
