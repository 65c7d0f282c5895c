"""The mean that the server's common grid gives, written another way: divide, round, add whole numbers."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Arrays = Mapping[str, np.ndarray]


def grid_of(model: np.ndarray, floor: float = 1.0) -> float:
    """2^-29 of the power of two at or above the largest magnitude, as float16 has it, and the floor."""
    largest = max(abs(float(np.float16(value))) for value in (model.max(), model.min()))
    return 2.0 ** (math.ceil(math.log2(max(largest, floor))) - 29)


def rounded_mean(
    model: Arrays, differences: Sequence[Arrays], weights: Sequence[int] | None = None, floor: float = 1.0
) -> dict[str, np.ndarray]:
    """The weighted mean of differences to a model, in the model's types; of whole numbers the maximum."""
    weights = weights or [1] * len(differences)
    result: dict[str, np.ndarray] = {}
    for name, value in model.items():
        parts = [np.asarray(difference[name]) for difference in differences]
        if value.dtype.kind != "f":
            result[name] = np.max(parts, axis=0).astype(value.dtype)
            continue
        grid = grid_of(value, floor)
        wide = [weight * part.astype(np.float64) for weight, part in zip(weights, parts, strict=True)]
        total = sum(np.rint(part / grid).astype(np.int64) for part in wide)
        result[name] = np.asarray(np.asarray(total).astype(np.float64) * grid / sum(weights)).astype(value.dtype)
    return result


def distance_to_float64(
    model: Arrays, differences: Sequence[Arrays], weights: Sequence[int] | None = None, floor: float = 1.0
) -> float:
    """The most by which the mean in whole grids is from the one in float64, before both become float32; in scales."""
    weights = weights or [1] * len(differences)
    largest = 0.0
    for name, value in model.items():
        if value.dtype.kind != "f" or not value.size:
            continue
        grid = grid_of(value, floor)
        wide = [weight * np.asarray(d[name], np.float64) for weight, d in zip(weights, differences, strict=True)]
        apart = sum(np.rint(part / grid) * grid for part in wide) - sum(wide)
        largest = max(largest, float(np.abs(apart).max()) / sum(weights) / (grid * 2**29))
    return largest
