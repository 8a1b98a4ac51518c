"""Each program has its own broker, at its defaults, so that topics can have the names that users give them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from busy_scene import Scene

import semel

collect_ignore_glob = ["programs/*"]
"""Scripts: they would run if pytest looked for doctests in them."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with semel.Broker() as broker:
        scene = Scene(broker.bootstrap, tmp_path)
        try:
            yield scene
        finally:
            scene.close()
