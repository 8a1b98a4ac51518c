"""`kill -9` at every named point, a second mirror of one name, and lost clusters: nothing lost, repeated or torn."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

from mirror_scene import RunningMirror, Scene, Writer, clusters, scene
from session_scene import wait_until

import semel
from semel.bridges.failpoints import MIRROR_POINTS

__all__ = ["clusters", "scene"]

WORKER = Path(__file__).parent / "mirror_worker.py"


def live(scene: Scene, *points: str) -> list[int]:
    """Lives that end at these points; their exit statuses. Every transaction of the source is a cut of its own."""
    options = scene.options(idle_ms=400, cut_bytes=1, groups=".*", groups_s=0.01)
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(options), *points],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


def test_every_record_is_mirrored_once_though_the_mirror_is_killed_at_every_point(
    scene: Scene, rng: random.Random
) -> None:
    """H2: each life dies at the next point, in its third cut; the last one finishes."""
    scene.create("orders", 3)
    scene.create("items", 2)
    writer = Writer(scene.source, scene.topics, rng)
    for _ in range(60):
        writer.write()
    writer.close()
    points = [
        point if point in ("mirror_taken_over", "mirror_groups_carried") else f"{point}:3" for point in MIRROR_POINTS
    ]
    ended = live(scene, *points, "")
    assert ended == [-signal.SIGKILL] * len(points) + [0]
    scene.assert_equal()
    scene.assert_whole()


def test_a_second_mirror_of_the_same_name_fences_the_first(scene: Scene, rng: random.Random) -> None:
    """The first ends with one clear error, and no record is at the target twice."""
    scene.create("orders")
    writer = Writer(scene.source, scene.topics, rng)
    with RunningMirror(scene.options()) as first:
        writer.write(abort=False)
        wait_until(lambda: bool(first.progress and first.progress[-1].cuts), "a cut")
        with RunningMirror(scene.options()) as second:
            for _ in range(5):
                writer.write()
            writer.write(abort=False)
            first.join()
            assert isinstance(first.error, semel.Fenced)
            assert "Another mirror of the name" in str(first.error)
        assert second.error is None
    writer.close()
    scene.mirror()
    scene.assert_equal()
    scene.assert_whole()


def test_a_source_and_a_target_that_are_killed_and_come_back_lose_nothing(rng: random.Random) -> None:
    """Both brokers are killed with SIGKILL in turns while the mirror runs; it waits for them and goes on."""
    with semel.Broker() as source, semel.Broker() as target:
        scene = Scene(source.bootstrap, target.bootstrap)
        scene.create("orders", 3)
        writer = Writer(source.bootstrap, scene.topics, rng)
        with RunningMirror(scene.options()) as mirror:
            for broker in (target, source):
                for _ in range(5):
                    writer.write()
                broker.kill()
                broker.restart()
        assert mirror.error is None
        writer.close()
        scene.mirror()
        scene.assert_equal()
        scene.assert_whole()
