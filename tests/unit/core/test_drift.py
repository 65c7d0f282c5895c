"""Client drift and spectral distance, against loops over the definitions in float64."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmofl.core.drift import Drift, DriftOfRound, mean_distance, profile_distances


def client_drift(differences: list[dict[str, np.ndarray]], parameters: set[str]) -> Drift:
    """What a round of these updates has, one after the other."""
    of_round = DriftOfRound(parameters)
    for difference in differences:
        of_round.add(difference)
    return of_round.drift()


def updates(seed: int, sites: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": rng.normal(size=(3, 4)).astype(np.float32),
            "b": rng.normal(size=5).astype(np.float32),
            "count": np.array(seed + site),
        }
        for site in range(sites)
    ]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_drift_is_its_definition(seed: int, sites: int) -> None:
    given_updates = updates(seed, sites)
    flat = [np.concatenate([one["w"].ravel(), one["b"]]).astype(np.float64) for one in given_updates]
    mean = sum(flat) / sites
    dispersion = np.sqrt(sum(np.linalg.norm(one - mean) ** 2 for one in flat) / sites)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(flat, 2)]
    drift = client_drift(given_updates, {"w", "b"})
    assert drift.dispersion == pytest.approx(dispersion, rel=1e-9)
    assert drift.relative == pytest.approx(dispersion / np.linalg.norm(mean), rel=1e-9)
    assert drift.cosine == pytest.approx(np.mean(cosines), rel=1e-9, abs=1e-12)


def test_counters_are_no_drift() -> None:
    same = {"w": np.ones(4, np.float32)}
    drift = client_drift([same | {"count": np.array(1)}, same | {"count": np.array(9)}], {"w"})
    assert (drift.dispersion, drift.relative, drift.cosine) == (0.0, 0.0, pytest.approx(1.0))


def test_opposite_updates_have_no_mean_to_compare_with() -> None:
    up = {"w": np.array([3.0, 4.0], np.float32)}
    drift = client_drift([up, {"w": -up["w"]}], {"w"})
    # each is 5 away from a mean of 0
    assert drift.dispersion == pytest.approx(5.0) and drift.relative is None and drift.cosine == pytest.approx(-1.0)


def test_small_updates_are_compared_with_their_mean_too() -> None:
    up = {"w": np.array([0.03, 0.04])}
    drift = client_drift([up, {"w": np.array([0.03, -0.04])}], {"w"})
    # each is 0.04 away from the mean (0.03, 0), which is 0.03 long; cosine (0.0009 - 0.0016) / 0.05^2
    assert drift.dispersion == pytest.approx(0.04)
    assert drift.relative == pytest.approx(4 / 3) and drift.cosine == pytest.approx(-0.28)


def test_one_site_and_a_site_that_stood_still() -> None:
    one = client_drift([{"w": np.ones(2)}], {"w"})
    assert one.dispersion == 0.0 and one.cosine is None
    assert client_drift([{"w": np.ones(2)}, {"w": np.zeros(2)}], {"w"}).cosine is None
    with pytest.raises(ValueError, match="at least one site"):
        client_drift([], {"w"})


def test_distance_of_profiles_is_root_mean_square() -> None:
    profiles = np.array([[[0.0, 0.0]], [[3.0, 1.0]], [[0.0, 2.0]]])
    distances = profile_distances(profiles)
    # sqrt((9 + 1) / 2), sqrt((0 + 4) / 2), sqrt((9 + 1) / 2)
    expected = {(0, 1): np.sqrt(5), (0, 2): np.sqrt(2), (1, 2): np.sqrt(5)}
    for (row, column), value in expected.items():
        assert distances[row, column] == distances[column, row] == pytest.approx(value)
    assert np.diag(distances).tolist() == [0, 0, 0]
    assert mean_distance(profiles) == pytest.approx(sum(expected.values()) / 3)
    assert mean_distance(profiles[:1]) is None
