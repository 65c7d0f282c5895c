"""How often the intervals of the evidence hold the truth, by simulation: 0.95 is what they claim.

    python -m tests.benchmarks.interval_coverage [--repeats 2000]

Patients differ in how hard their images are. A row says how many patients, how much they differ, in which part of the
draws an interval is given, and which part of these holds the truth.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import erf, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from harmofl.core.classification import accuracy, auroc
from harmofl.core.clustered import Units
from harmofl.core.paired import interval_over_patients
from harmofl.core.scores import summarize
from harmofl.evidence.patient_differences import patient_difference
from harmofl.evidence.results import ScoreSummary

IMAGES = 500  # of a patient
HARD, SPREAD = 1.5, 0.5  # logit of the accuracy within a patient: mean and standard deviation
Draw = Callable[[np.random.Generator], tuple[float | None, float | None, float]]  # low, high, truth


@dataclass(frozen=True)
class Coverage:
    """Part of the draws with an interval, and part of these intervals that holds the truth (NaN for none)."""

    given: float
    holds: float


def coverage(draw: Draw, repeats: int, seed: int = 0) -> Coverage:
    """Of one situation."""
    rng = np.random.default_rng(seed)
    drawn = [draw(rng) for _ in range(repeats)]
    held = [low <= truth <= high for low, high, truth in drawn if low is not None and high is not None]
    return Coverage(len(held) / repeats, float(np.mean(held)) if held else float("nan"))


def shares(right: NDArray[np.int64], of: NDArray[np.int64]) -> ScoreSummary:
    """A share with what each patient has of it, as a site sends it."""
    parts = list(zip(right.tolist(), of.tolist(), strict=True))
    mean, images = float(right.sum() / of.sum()), int(of.sum())
    return ScoreSummary(mean=mean, low=None, high=None, n=images, undefined=0, per_case=[], by_patient=parts)


def images_of(rng: np.random.Generator, patients: int, uneven: bool) -> NDArray[np.int64]:
    """Number of images of each patient; uneven: a tenth to ten times the middle one for most."""
    if not uneven:
        return np.full(patients, IMAGES)
    return np.maximum(rng.lognormal(np.log(IMAGES), 0.8, patients), 5).astype(np.int64)


def difference(patients: int, spread: float, *, uneven: bool = False) -> Draw:
    """Two models of equal accuracy; which one is better differs by patient, by `spread` on the logit scale."""

    def draw(rng: np.random.Generator) -> tuple[float | None, float | None, float]:
        hardness, favor = rng.normal(HARD, SPREAD, patients), rng.normal(0, spread, patients)
        of = images_of(rng, patients, uneven)
        ours, theirs = (rng.binomial(of, _chance(hardness + sign * favor / 2)) for sign in (1, -1))
        found = patient_difference(shares(ours, of), shares(theirs, of))
        assert found is not None
        return found.interval.low, found.interval.high, 0.0

    return draw


def one_share(
    patients: int, spread: float, *, hard: float = HARD, uneven: bool = False, mistaken: bool = False
) -> Draw:
    """The accuracy of one model; the truth is the mean over very many patients. Mistaken: images count as patients."""
    truth = float(_chance(np.random.default_rng(1).normal(hard, spread, 200_000)).mean())

    def draw(rng: np.random.Generator) -> tuple[float | None, float | None, float]:
        of = images_of(rng, patients, uneven) // 10
        right = rng.binomial(of, _chance(rng.normal(hard, spread, patients)))
        labels = np.concatenate([np.arange(count) < some for some, count in zip(right, of, strict=True)])
        patient = np.arange(len(labels)) if mistaken else np.repeat(np.arange(patients), of)
        found = accuracy(torch.ones(len(labels)), torch.from_numpy(labels), torch.from_numpy(patient))
        return (None if found.no_interval else found.low), found.high, truth

    return draw


def area(patients: int, spread: float) -> Draw:
    """AUROC of normal evidence, shifted by 1.5 for class 1 and by the patient for either class."""
    truth = 0.5 * (1 + erf(1.5 / sqrt(2 * (1 + spread**2)) / sqrt(2)))

    def draw(rng: np.random.Generator) -> tuple[float | None, float | None, float]:
        of = rng.integers(20, 60, patients)
        patient = np.repeat(np.arange(patients), of)
        label = rng.integers(0, 2, len(patient))
        shift = rng.normal(0, spread, (2, patients))[label, patient]
        evidence = 1.5 * label + shift + rng.normal(0, 1, len(patient))
        found = auroc(*(torch.from_numpy(held) for held in (evidence, label, patient)))
        return (None if found.no_interval else found.low), found.high, truth

    return draw


def mean_dice(patients: int, cases: int) -> Draw:
    """Mean Dice of several cases a patient; the patient decides more of it than the case."""
    truth = float(_chance(np.random.default_rng(1).normal(2.0, 0.65, 200_000)).mean())

    def draw(rng: np.random.Generator) -> tuple[float | None, float | None, float]:
        logits = rng.normal(2.0, 0.6, patients)[:, None] + rng.normal(0, 0.25, (patients, cases))
        found = summarize(_chance(logits).ravel().tolist(), np.repeat(np.arange(patients), cases).tolist())
        return found.low, found.high, truth

    return draw


def over_sites(sites: int, patients: int) -> Draw:
    """A comparison's difference over the patients of several sites, whose spread differs threefold."""

    def draw(rng: np.random.Generator) -> tuple[float | None, float | None, float]:
        values = [rng.normal(0, 0.02 * 3 ** (site % 2), patients) for site in range(sites)]
        held = [(float(own.mean()), Units(own, float(patients))) for own in values]
        low, high = interval_over_patients([held], recurring=False) or (None, None)
        return low, high, 0.0

    return draw


def _chance(logit: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logit))


def rows(repeats: int) -> Iterator[str]:
    """The lines of the table."""
    yield f"{'interval':<34} {'patients':>8} {'spread':>6}  {'given':>5}  {'holds the truth':>15}"
    situations: list[tuple[str, int, float, Draw]] = []
    for patients in (2, 3, 4, 10):
        for spread in (0.0, 0.24, 0.48):
            situations.append(("difference of accuracies", patients, spread, difference(patients, spread)))
    for patients in (3, 4, 10):
        situations += [
            ("the same, uneven patients", patients, 0.48, difference(patients, 0.48, uneven=True)),
            ("accuracy", patients, 0.7, one_share(patients, 0.7)),
            ("accuracy, uneven patients", patients, 0.7, one_share(patients, 0.7, uneven=True)),
            ("accuracy, images as patients", patients, 0.7, one_share(patients, 0.7, mistaken=True)),
            ("accuracy near 0.97", patients, 0.7, one_share(patients, 0.7, hard=3.5)),
            ("AUROC", patients, 0.3, area(patients, 0.3)),
            ("mean Dice, 3 cases a patient", patients, 0.6, mean_dice(patients, 3)),
            ("comparison, 6 sites", patients, 0.02, over_sites(6, patients)),
        ]
    for name, patients, spread, draw in situations:
        told = coverage(draw, repeats)
        holds = f"{told.holds:.3f}" if told.given else "no interval"
        yield f"{name:<34} {patients:>8} {spread:>6.2f}  {told.given:>5.2f}  {holds:>15}"


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    for line in rows(parser.parse_args().repeats):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
