"""`semel mirror` as a command: one route by options, several by a file, and what it says."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mirror_scene import Scene, Writer, clusters, create, records, scene

import semel
from semel.bridges.mirror.routes import read_routes, run_routes

__all__ = ["clusters", "scene"]


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).parent / "semel"), "mirror", *arguments]


def test_the_command_mirrors_until_it_is_stopped(scene: Scene, rng: random.Random) -> None:
    """One line when it is ready, one at the end, and SIGTERM ends it in order."""
    scene.create("orders", 2)
    writer = Writer(scene.source, scene.topics, rng)
    writer.write(abort=False)
    writer.close()
    one = command("--from", scene.source, "--to", scene.target, "--topics", f"{scene.prefix}.*", "--name", scene.name)
    done = subprocess.run([*one, "--idle-ms", "300"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert f"semel mirror ready: {scene.name}" in done.stdout
    assert "records in 1 cuts." in done.stdout
    scene.assert_equal()
    running = subprocess.Popen(one, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline().startswith("semel mirror ready")
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 143
    running.stdout.close()


def test_a_missing_option_is_one_sentence(scene: Scene) -> None:
    """And status 2, as of every wrong use."""
    done = subprocess.run(command("--from", "a:1"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "--to is missing: a mirror needs --from, --to, --topics and --name, or --config."


def test_several_routes_of_a_file_run_beside_each_other(scene: Scene, tmp_path: Path, rng: random.Random) -> None:
    """Two routes in opposite directions, each with topics of its own."""
    topic = scene.create("orders", 2)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(5):
        writer.write(abort=False)
    writer.close()
    create(scene.target, f"{scene.prefix}back", 1)
    with semel.Producer(bootstrap_servers=scene.target) as producer:
        producer.send(f"{scene.prefix}back", b"{}")
    file = tmp_path / "routes.toml"
    file.write_text(
        f'[[route]]\nname = "{scene.name}-1"\nfrom = "{scene.source}"\nto = "{scene.target}"\ntopics = "{topic}"\n'
        f'rename = "west.{{topic}}"\n[route.target]\n"compression.type" = "lz4"\n'
        f'[[route]]\nname = "{scene.name}-2"\nfrom = "{scene.target}"\nto = "{scene.source}"\n'
        f'topics = "{scene.prefix}back"\ngroups = ""\n'
    )
    reports = run_routes(read_routes(file), threading.Event(), idle_ms=300)
    assert [report.records > 0 for report in reports.values()] == [True, True]
    assert records(scene.target, f"west.{topic}") == records(scene.source, topic)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no routes"),
        ("route = 1", "has no routes"),
        ("[[route", "cannot be read"),
        ('[[route]]\nname = "a"\nfrom = "a:1"\nto = "b:1"\n', "lacks 'topics'"),
        ('[[route]]\nname = "a"\nfrom = "a:1"\nto = "b:1"\ntopics = "t"\ncolour = "red"\n', "no option 'colour'"),
        ('[[route]]\nname = "a"\nfrom = "a:1"\nto = "b:1"\ntopics = "t"\n' * 2, "two routes of one name"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """Before any cluster is asked."""
    file = tmp_path / "routes.toml"
    file.write_text(text)
    with pytest.raises(semel.ConfigError, match=words):
        read_routes(file)


def test_a_route_that_fails_ends_the_others(scene: Scene, tmp_path: Path) -> None:
    """Its error is raised; the other one stops in order."""
    scene.create("orders", 1)
    file = tmp_path / "routes.toml"
    common = f'from = "{scene.source}"\ntopics = "{scene.prefix}.*"\n'
    file.write_text(
        f'[[route]]\nname = "{scene.name}-1"\nto = "{scene.target}"\n{common}'
        f'[[route]]\nname = "{scene.name}-2"\nto = "{scene.source}"\n{common}'
    )
    with pytest.raises(semel.ConfigError, match="copied into themselves"):
        run_routes(read_routes(file), threading.Event())
