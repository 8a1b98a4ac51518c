"""Children end with their parent, and not before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from process_state import is_gone, wait_until

from semel.processes import spawn

SLEEP = shutil.which("sleep") or "/bin/sleep"
CAT = shutil.which("cat") or "/bin/cat"

SPAWNS_AND_WAITS = """
import sys, time
from pathlib import Path
from semel.processes import spawn
print(spawn([sys.argv[1], "600"], folder=Path.cwd()).pid, flush=True)
time.sleep(600)
"""


def test_child_dies_with_a_killed_parent() -> None:
    """SIGKILL gives the parent no chance to clean up; its child is gone all the same."""
    command = [sys.executable, "-c", SPAWNS_AND_WAITS, SLEEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(child))


def test_child_outlives_the_thread_that_asked_for_it(tmp_path: Path) -> None:
    """The end of a thread is not the end of the process, although the kernel's notice is about threads."""
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(spawn([CAT], folder=tmp_path, pipes=True)))
    thread.start()
    thread.join()
    (child,) = started
    assert child.communicate(b"still here", timeout=30) == (b"still here", None)
    assert child.returncode == 0


def test_output_is_appended_to_the_file(tmp_path: Path) -> None:
    """Both output streams go to the file, after what a former run left there."""
    log = tmp_path / "log"
    for word in ("one", "two"):
        script = f"import sys; print('{word}', flush=True); print('{word}', file=sys.stderr)"
        assert spawn([sys.executable, "-c", script], folder=tmp_path, output=log).wait(30) == 0
    assert log.read_text().split() == ["one", "one", "two", "two"]


def test_missing_program_is_an_exit_code(tmp_path: Path) -> None:
    """A program that is not there ends the child with an error in its log, and the caller goes on."""
    log = tmp_path / "log"
    child = spawn(["/there/is/no/such/program"], folder=tmp_path, output=log)
    assert child.wait(30) != 0
    assert "FileNotFoundError" in log.read_text()


def test_missing_folder_is_told_to_the_caller(tmp_path: Path) -> None:
    """An error of the spawning thread is raised where spawn was called."""
    with pytest.raises(FileNotFoundError):
        spawn([CAT], folder=tmp_path / "absent", pipes=True)
