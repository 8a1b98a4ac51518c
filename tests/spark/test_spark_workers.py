"""What a task leaves behind in Spark's Python worker."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_TASK = """
import gc, importlib, sys
sys.path.insert(0, sys.argv[1])
import early.module
from semel.spark.workers import ease_worker

def cached():
    return [path for path in sys.path_importer_cache if path.startswith(sys.argv[1])]

assert len(cached()) == 2, cached()  # the archive, and the package in it
ease_worker()
assert cached() == []
assert gc.get_freeze_count() > 1000
importlib.invalidate_caches()
import early.later, late
frozen = gc.get_freeze_count()
ease_worker()
assert cached() == []
assert gc.get_freeze_count() <= frozen, "only the first task freezes"
"""


@pytest.mark.parametrize("name", ["pyspark.zip", "py4j-0.10.9.9-src.zip", "spark-core_2.13-4.0.0.jar"])
def test_a_worker_reads_no_archive_of_sparks_again_and_still_imports_from_it(name: str, tmp_path: Path) -> None:
    """Importers of Spark's archives are gone after a task and come back when asked for; garbage is looked for once."""
    archive = tmp_path / name
    with zipfile.ZipFile(archive, "w") as packed:
        for module in ("early/__init__.py", "early/module.py", "early/later.py", "late.py"):
            packed.writestr(module, "")
    done = subprocess.run([sys.executable, "-c", _TASK, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importers_of_other_archives_stay(tmp_path: Path) -> None:
    """A user's own archive may change, so Spark must be able to have it read anew."""
    archive = tmp_path / "jobs-pyspark.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("job.py", "")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import job; from semel.spark.workers import ease_worker\n"
    code += "ease_worker(); assert sys.argv[1] in sys.path_importer_cache"
    done = subprocess.run([sys.executable, "-c", code, str(archive)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
