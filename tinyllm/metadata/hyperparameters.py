"""Typed and checked access to a file's `<architecture>.<key>` metadata; complaints name the file and the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ModelFileError
from ..gguf_file import GGUFFile


class Hyperparameters:
    """The metadata under one architecture's prefix. Its methods raise ModelFileError for values that make no sense."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture

    def fail(self, key: str, complaint: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {self.architecture}.{key} {complaint}")

    def value(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def has(self, key: str) -> bool:
        return self.value(key) is not None

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise self.fail(key, f"is {_shown(value)}, not a whole number")
        if not minimum <= value <= maximum:
            raise self.fail(key, f"is {value}, not between {minimum} and {maximum}")
        return int(value)

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A finite number not below `minimum`."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"is {_shown(value)}, not a finite number")
        if value < minimum:
            raise self.fail(key, f"is {value}, below {minimum:g}")
        return float(value)

    def factor(self, key: str, default: float = 1.0) -> float:
        """A factor above zero; files write 0 for "none given"."""
        return self.number(key, default) or default

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool | np.bool_):
            raise self.fail(key, f"is {_shown(value)}, neither true nor false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"is {_shown(value)}, not a text")
        return value

    def per_layer(
        self, key: str, n_layers: int, default: int | None = None, minimum: int = 1, maximum: int = 2**20
    ) -> list[int]:
        """A whole number for all layers, or an array with one for each."""
        values = self.value(key)
        if not isinstance(values, np.ndarray | list):
            return [self.integer(key, default, minimum, maximum)] * n_layers
        if len(values) < n_layers:
            raise self.fail(key, f"has {len(values)} values for {n_layers} layers")
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
            raise self.fail(key, "holds something else than whole numbers")
        numbers = [int(value) for value in values[:n_layers]]
        for number in numbers:
            if not minimum <= number <= maximum:
                raise self.fail(key, f"holds {number}, not between {minimum} and {maximum}")
        return numbers

    def _given(self, key: str, default: Any) -> Any:
        value = self.value(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        return value


def _shown(value: Any) -> str:
    return "an array" if isinstance(value, np.ndarray | list) else repr(value)
