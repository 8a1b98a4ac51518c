"""The tutorial, followed by copy and paste in an empty folder, where only the wheel is installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from doc_examples import ROOT, examples

pytestmark = pytest.mark.install

PAGE = ROOT / "docs" / "tutorial.md"
_TIME_S = 420
_FILE = re.compile(r"^`([\w.]+)`:\s*(?:<!-- example: tutorial -->\s*)?\Z", re.MULTILINE)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def build_wheel(folder: Path) -> Path:
    uv = shutil.which("uv", path=f"{os.environ['PATH']}:{ROOT / '.tools' / 'bin'}")
    assert uv is not None, "uv is missing: `make setup` puts it into .tools"
    subprocess.run([uv, "-q", "build", "--wheel", "--out-dir", str(folder), str(ROOT)], check=True, timeout=300)
    (wheel,) = folder.glob("semel-*.whl")
    return wheel


def pasted(port: int) -> str:
    """All blocks as one would paste them into a shell, Python blocks into the files named above them."""
    text = PAGE.read_text()
    parts: list[str] = []
    for step in examples(PAGE):
        assert step.is_step, f"{step.name} is no step"
        if step.language == "python":
            before = "\n".join(text.splitlines()[: step.line - 1])
            named = _FILE.search(before)
            assert named is not None, f"{step.name}: the line above it must name its file"
            parts.append(f"cat > {shlex.quote(named[1])} <<'END OF FILE'\n{step.code}END OF FILE\n")
        else:
            parts.append(f"echo '==== line {step.line}'\n{step.code}")
    return "\n".join(parts).replace("9092", str(port))


def test_the_tutorial_is_followed_by_copy_and_paste(tmp_path: Path) -> None:
    """From `pip install` to a pipeline that loses and repeats nothing though it is killed. Only the port is another
    one, and `pip` is told where the wheel is, which is not published yet."""
    wheel = build_wheel(tmp_path)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"semel @ {wheel.as_uri()}\n")
    folder = tmp_path / "reader"
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "SEMEL"))}
    # `set -m` and -e: jobs have numbers as in a terminal, and a command that fails ends the test.
    with subprocess.Popen(
        ["bash", "-c", f"set -me\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{pasted(free_port())}"],
        cwd=folder,
        env={**kept, "PIP_CONSTRAINT": str(constraints), "PIP_QUIET": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            said, _ = shell.communicate(timeout=_TIME_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said
    assert "\n10 transactions committed\n" in said or re.search(r"\n1\d transactions committed\n", said), said
    assert "all orders have an invoice\n" in said
    assert "100000 invoices for 100000 orders\n" in said
    assert "invoicing" in said
    assert not (folder / "semel-tutorial").exists()
