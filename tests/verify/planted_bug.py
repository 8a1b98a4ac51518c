"""What a planted bug is: a patch of real code, a scene in which it shows, and what the checker must call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
from small_scenes import Scene

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    """A bug of clients is not one of the judge, who reads when it is gone; one of the broker stays to the end."""

    plant: Plant
    side: Literal["broker", "client"]
    scene: Scene
    anomalies: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.plant.__name__} ({self.scene.name})"


class Bugs(list[Bug]):
    """The bugs of one side; as a decorator it takes the next one."""

    def __init__(self, side: Literal["broker", "client"]) -> None:
        super().__init__()
        self._side: Literal["broker", "client"] = side

    def shown_in(self, scene: Scene, *anomalies: str) -> Callable[[Plant], Plant]:
        def take(plant: Plant) -> Plant:
            self.append(Bug(plant, self._side, scene, anomalies))
            return plant

        return take
