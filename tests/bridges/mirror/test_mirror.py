"""A mirror between two clusters: every committed record once, in order, and no transaction torn."""

from __future__ import annotations

import random

import pytest
from mirror_scene import RunningMirror, Scene, Writer, clusters, scene

__all__ = ["clusters", "scene"]


@pytest.mark.parametrize("protocol", [1, 2])
def test_what_is_there_is_mirrored_record_by_record(scene: Scene, rng: random.Random, protocol: int) -> None:
    """Keys, values, headers, timestamps, partitions and order; aborted records stay behind."""
    scene.create("orders", 3)
    scene.create("items", 2)
    writer = Writer(scene.source, scene.topics, rng, protocol=protocol)
    for _ in range(40):
        writer.write()
    writer.close()
    report = scene.mirror()
    scene.assert_equal()
    scene.assert_whole()
    assert report.records > 0
    assert scene.mirror().records == 0  # a second start repeats nothing


@pytest.mark.parametrize("protocol", [1, 2])
def test_transactions_are_whole_while_they_come(scene: Scene, rng: random.Random, protocol: int) -> None:
    """The mirror runs beside two writers, and stops and starts three times in between."""
    scene.create("orders", 3)
    scene.create("items", 2)
    writers = [Writer(scene.source, scene.topics, rng, protocol=protocol) for _ in range(2)]
    cuts = 0
    for _ in range(3):
        with RunningMirror(scene.options()) as mirror:
            for _ in range(15):
                for writer in writers:
                    writer.write()
        assert mirror.error is None
        cuts += mirror.report.cuts
    for writer in writers:
        writer.close()
    scene.mirror()
    scene.assert_equal()
    scene.assert_whole()
    assert cuts > 3  # it did not wait until everything was over
