"""Weights that change while one trains."""

from __future__ import annotations

from dataclasses import dataclass


class LossWeight:
    """A weight with a floor."""

    floor = 0.1

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def current(self) -> float:
        return max(self.value, self.floor)


class Temperature:
    """Of a softmax; read as a property."""

    def __init__(self, value: float = 2.0, scale: float = 1.0) -> None:
        self._value = value
        self.scale = scale

    @property
    def value(self) -> float:
        return self._value * self.scale


@dataclass
class Mixing:
    """How much of each loss counts."""

    main: float = 1.0
    auxiliary: float = 0.25
    enabled: bool = True


class Registry:
    """Loss weights by name."""

    def __init__(self) -> None:
        self.weights = {"ce": 1.0, "l2": 0.01}

    def __getitem__(self, name: str) -> float:
        return self.weights[name]
