"""The program and the commands of docs/mirror.md, run as they stand there, with real addresses."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from mirror_scene import clusters, create, read, settings

import semel

__all__ = ["clusters"]

PAGE = (Path(__file__).parents[3] / "docs" / "mirror.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_program_of_the_page_mirrors_a_transaction() -> None:
    """What a newcomer copies works."""
    [program] = blocks("python")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2 records in 1 cut\n"), done.stderr


def test_the_commands_of_the_page_mirror_until_they_are_stopped(clusters: tuple[str, str], tmp_path: Path) -> None:
    """One route by options, two by the file that the page shows."""
    source, target = clusters
    for topic in ("orders", "items", "payments-eu"):
        create(source, topic)
        with semel.Producer(settings(source)) as producer:
            producer.send(topic, b"one")
    [routes] = blocks("toml")
    (tmp_path / "routes.toml").write_text(routes.replace("127.0.0.1:9092", source).replace("127.0.0.1:9192", target))
    for block, topics in zip(blocks("sh"), (("orders", "items"), ("west.payments-eu",)), strict=True):
        words = [{"127.0.0.1:9092": source, "127.0.0.1:9192": target}.get(word, word) for word in shlex.split(block)]
        command = [str(Path(sys.executable).parent / "semel"), *words[1:]]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            assert running.stdout is not None
            assert running.stdout.readline().startswith("semel mirror ready: west")
            while not all(_has_one(target, topic) for topic in topics):
                assert running.poll() is None
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
            running.wait()
        assert running.returncode == 0, said


def _has_one(bootstrap: str, topic: str) -> bool:
    with semel.Admin(settings(bootstrap)) as admin:
        if topic not in admin.list_topics():
            return False
    return len(read(bootstrap, topic)[0]) == 1
