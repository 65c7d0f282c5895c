"""Federated minus local-only: what a site gains by taking part, case by case, with intervals over patients."""

from collections.abc import Sequence
from dataclasses import dataclass

from harmofl.core.clustered import NO_INTERVAL, Interval, interval_of, ratio_units
from harmofl.data.findings import count_text
from harmofl.evidence.patient_differences import OtherCasesError, patient_difference
from harmofl.evidence.results import Results, ResultsError

LOCAL_ONLY = "local_only"
# a pair is the same case of the same site scored by two models: these settings decide which cases are tested
_SAME = ("task", "seed", "data", "reader")
_SCORES = ("federated", "local", "mean")


@dataclass(frozen=True)
class Difference:
    """Federated minus local-only at one site, or over sites.

    Attributes:
        name: of the site, or of the mean.
        federated, local: the two scores.
        mean: their difference.
        low, high: its 95 % interval over patients, or over sites; None where there is none.
        why: there is none, in words.
        units: number of patients, or sites.
        compared: what both models scored: `12 cases`.
    """

    name: str
    federated: float
    local: float
    mean: float
    low: float | None
    high: float | None
    why: str
    units: int
    compared: str


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
    try:
        gain = patient_difference(ours, theirs)
    except OtherCasesError as error:
        raise ResultsError(f"--local-only: site {site} {error}; run both on the same data") from None
    if gain is None:
        return None
    compared = f"{gain.count} {gain.counted}"
    return _with_interval(site, (ours.mean, theirs.mean, gain.mean), gain.interval, compared)


def _over_sites(sites: Sequence[Difference]) -> Difference | None:
    """The mean over sites; its interval takes the sites as the units, so it holds for other sites like these."""
    if not sites:
        return None
    federated, local, mean = (sum(getattr(site, name) for site in sites) / len(sites) for name in _SCORES)
    units = ratio_units([(difference.mean, 1) for difference in sites])
    found = interval_of(mean, units, len(sites), None)
    return _with_interval("mean over sites", (federated, local, mean), found, count_text(len(sites), "site"))


def _with_interval(name: str, scores: tuple[float, float, float], found: Interval, compared: str) -> Difference:
    why = NO_INTERVAL[found.no_interval] if found.no_interval else ""
    return Difference(name, *scores, found.low, found.high, why, found.count, compared)
