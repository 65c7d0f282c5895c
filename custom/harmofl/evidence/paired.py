"""Federated minus local-only: what a site gains by taking part, case by case, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from harmofl.core.paired import paired_difference
from harmofl.data.findings import count_text
from harmofl.evidence.results import Results, ResultsError, ScoreSummary

LOCAL_ONLY = "local_only"
# a pair is the same case of the same site scored by two models: these settings decide which cases are tested
_SAME = ("task", "seed", "data", "reader")


@dataclass(frozen=True)
class Difference:
    """Federated minus local-only at one site, or over sites; its 95 % interval is None where it is undefined.

    `paired` tells whether it is a mean over cases that both models scored.
    """

    name: str
    federated: float
    local: float
    mean: float
    low: float | None
    high: float | None
    n: int
    paired: bool


@dataclass(frozen=True)
class Comparison:
    """The difference at every site with both scores, over these sites, and the sites without."""

    sites: tuple[Difference, ...]
    over_sites: Difference | None
    without: tuple[str, ...]

    @property
    def better(self) -> int:
        """Number of sites where the federated model scores higher."""
        return sum(difference.mean > 0 for difference in self.sites)


def compare_with_local(federated: Results, local: Results) -> Comparison:
    """Pair the test scores of a federated run with those of a run where every site trained alone.

    Raises:
        ResultsError: the other run is not local-only, or tested other cases; one line.
    """
    if local.method != LOCAL_ONLY:
        raise ResultsError(f"--local-only: that run's method is {local.method}, not {LOCAL_ONLY}")
    if federated.method == LOCAL_ONLY:
        raise ResultsError(f"--local-only: the run itself is {LOCAL_ONLY} too; name a federated one first")
    for key in _SAME:
        if _deciding(federated, key) != _deciding(local, key):
            raise ResultsError(f"--local-only: the runs differ in {key}, so that they test other cases")
    if federated.demo != local.demo:
        raise ResultsError("--local-only: one run is a demo on synthetic data, the other is not")
    found = [(site, _difference(site, federated, local)) for site in federated.sites]
    sites = tuple(difference for _, difference in found if difference is not None)
    return Comparison(sites, _over_sites(sites), tuple(site for site, difference in found if difference is None))


def _deciding(results: Results, key: str) -> object:
    value = results.experiment.get(key)
    if isinstance(value, dict):
        return {name: held for name, held in value.items() if name not in ("simulated_root", "aliases")}
    return value


def _difference(site: str, federated: Results, local: Results) -> Difference | None:
    held = [run.sites[site].test.get(federated.key_score) for run in (federated, local) if site in run.sites]
    ours, theirs = held if len(held) == 2 else (None, None)
    if ours is None or theirs is None or ours.mean is None or theirs.mean is None:
        return None
    if len(ours.per_case) != len(theirs.per_case):
        raise ResultsError(
            f"--local-only: site {site} tested {count_text(len(ours.per_case), 'case')} in one run and "
            f"{len(theirs.per_case)} in the "
            "other; run both on the same data"
        )
    pairs = zip(ours.per_case, theirs.per_case, strict=True)
    gains = [one - other for one, other in pairs if one is not None and other is not None]
    if not ours.per_case:
        return Difference(
            site, ours.mean, theirs.mean, ours.mean - theirs.mean, *_unpaired(ours, theirs), ours.n, False
        )
    if not gains:
        return None
    mean, low, high = mean_with_interval(gains)
    return Difference(site, ours.mean, theirs.mean, mean, low, high, len(gains), True)


def _over_sites(sites: Sequence[Difference]) -> Difference | None:
    """The mean over sites; its interval takes the sites as the units, so it holds for other sites like these."""
    if not sites:
        return None
    mean, low, high = mean_with_interval([difference.mean for difference in sites])
    federated, local = (sum(getattr(site, name) for site in sites) / len(sites) for name in ("federated", "local"))
    return Difference("mean over sites", federated, local, mean, low, high, len(sites), True)


def mean_with_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Mean of differences in [-1, 1] with Student's 95 % interval; None where fewer than two values are there."""
    held = paired_difference(values, [0.0] * len(values))
    assert held.mean is not None
    if held.low is None or held.high is None:
        return held.mean, None, None
    return held.mean, max(-1.0, held.low), min(1.0, held.high)


def _unpaired(ours: ScoreSummary, theirs: ScoreSummary) -> tuple[float | None, float | None]:
    """Bounds of a difference from those of two scores taken as independent (Newcombe 1998, method 10).

    Two models on the same images agree more than that, so the interval is too wide rather than too narrow.
    """
    if None in (ours.low, ours.high, theirs.low, theirs.high):
        return None, None
    assert ours.mean is not None and theirs.mean is not None
    below = sqrt((ours.mean - ours.low) ** 2 + (theirs.high - theirs.mean) ** 2)  # type: ignore[operator]
    above = sqrt((ours.high - ours.mean) ** 2 + (theirs.mean - theirs.low) ** 2)  # type: ignore[operator]
    return ours.mean - theirs.mean - below, ours.mean - theirs.mean + above
