"""Every shipped job on a miniature of the public data set it is named for: real layout, real numbers of patients."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from harmofl.app import costs
from harmofl.app.cli import main
from harmofl.app.inspection import inspect
from harmofl.app.job import Job, read_job
from harmofl.data import checks
from harmofl.evidence.results import read_results
from harmofl.flare.in_process import InProcessFederation
from harmofl.flare.site import SiteError
from harmofl.flare.wire import ModelMessage
from harmofl.tasks import nuclei, place_sites
from tests.public_layouts import (
    MONUSAC_PATIENTS,
    PROSTATE_CASES,
    WILDS_PATIENTS,
    write_monusac,
    write_prostate,
    write_wilds,
)

JOBS = Path(__file__).resolve().parents[2] / "jobs"
SEEDS = 20
TINY = ("data.height=64", "data.width=64")
SHORT = ("network.width=4", "training.batch_size=8", "federation.rounds=1")
WRITERS: dict[str, Callable[[Path], Path]] = {"prostate": write_prostate, "camelyon17": write_wilds}
WRITERS["nuclei"] = write_monusac

# training, validation and test patients of each site, by hand in tests/unit/data/test_splits.py; of MoNuSAC's lung and
# breast one patient is left out, who stands in the test list too
PATIENTS: dict[str, dict[str, tuple[int, int, int]]] = {
    "prostate": {
        "BIDMC": (8, 2, 2),
        "BMC": (19, 5, 6),
        "HK": (8, 2, 2),
        "I2CVB": (12, 3, 4),
        "RUNMC": (19, 5, 6),
        "UCL": (8, 2, 3),
    },
    "camelyon17": {
        "hospital1": (5, 1, 1),
        "hospital2": (5, 1, 2),
        "hospital3": (6, 1, 2),
        "hospital4": (6, 2, 2),
        "hospital5": (6, 1, 2),
    },
    "nuclei": {"lung": (6, 1, 2), "kidney": (8, 2, 2), "breast": (6, 1, 2), "prostate": (9, 2, 3)},
}


@pytest.fixture(scope="session")
def public_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The miniature of a task's data set, written once; read only."""
    return cache(lambda task: WRITERS[task](tmp_path_factory.mktemp(task) / "data"))


@pytest.fixture
def _read_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decode each file once for all seeds: the seed changes nothing of it."""
    monkeypatch.setattr(checks, "read_pair", cache(checks.read_pair))
    monkeypatch.setattr(checks, "fit_pair", cache(checks.fit_pair))
    monkeypatch.setattr(checks, "_case_report", cache(checks._case_report))
    monkeypatch.setattr(nuclei, "read_nuclei", cache(nuclei.read_nuclei))
    yield


def job_of(task: str, *assignments: str) -> Job:
    """The shipped job; volumes and tiles are smaller, patches are as large as they lie on the disk."""
    return read_job(JOBS / f"harmofl_{task}", [*(() if task == "camelyon17" else TINY), *assignments])


def test_the_miniatures_have_the_public_numbers() -> None:
    counts = {task: {site: sum(parts) for site, parts in sites.items()} for task, sites in PATIENTS.items()}
    assert counts["prostate"] == {site: len(numbers) for site, numbers in PROSTATE_CASES.items()}
    assert sum(counts["prostate"].values()) == 116
    assert tuple(counts["camelyon17"].values()) == WILDS_PATIENTS
    assert counts["nuclei"] == {
        organ: number - (organ in {"lung", "breast"}) for organ, number in MONUSAC_PATIENTS.items()
    }


@pytest.mark.usefixtures("_read_once")
@pytest.mark.parametrize("task", PATIENTS)
def test_check_finds_nothing_and_every_site_sends_its_amplitude_at_any_seed(
    task: str, public_data: Callable[[str], Path]
) -> None:
    root = public_data(task)
    for seed in range(SEEDS):
        job = job_of(task, f"seed={seed}")
        experiment = job.resolve(demo=False)
        found = inspect(root, job, experiment, None)
        assert not found.problems and not found.findings, (seed, found.problems, found.findings)
        for site in found.sites:
            assert {finding.severity for finding in site.findings} <= {"notice"}, (seed, site.name)
            assert not any(finding.code == "split_filled" for finding in site.findings)
            assert site.report.training_patients == PATIENTS[task][site.name][0] >= experiment.amplitude.minimum_cases
    assert {site.name for site in found.sites} == set(PATIENTS[task])


@pytest.mark.parametrize("task", PATIENTS)
def test_one_run_of_the_job(task: str, public_data: Callable[[str], Path], tmp_path: Path) -> None:
    job, root = job_of(task, *SHORT), public_data(task)
    experiment = job.resolve(demo=False)
    federation = InProcessFederation(experiment, job.sites, tmp_path / "run", dict.fromkeys(job.sites, root))
    federation.run()
    results = read_results(tmp_path / "run" / "run" / "results.json")
    assert results.amplitude is not None and results.amplitude.sites == sorted(PATIENTS[task])
    assert not any("amplitude" in warning for warning in results.warnings)
    for site, parts in PATIENTS[task].items():
        result, data = results.sites[site], federation.participants[site].data
        assert data.patient_count == parts[0]
        assert sum(result.cases_used.values()) == len(cases_of(task, site)), site
        assert result.cases_skipped == {}
        assert result.test[results.key_score].n > 0


def cases_of(task: str, site: str) -> range:
    """As many cases as results.json counts of a site: volumes, patches (two a slide), images (one or two a patient)."""
    if task == "camelyon17":
        return range(20)
    patients = sum(PATIENTS[task][site])
    if task == "prostate":
        return range(patients)
    # every second patient has two images; the one who is left out is the first and has one
    return range(patients + MONUSAC_PATIENTS[site] // 2)


def test_two_hospitals_below_the_minimum_train_with_the_amplitude_of_the_others(
    public_data: Callable[[str], Path], tmp_path: Path
) -> None:
    """Six training patients are asked for: hospital1 and hospital2 have five, and three others are enough."""
    job, root = job_of("camelyon17", *SHORT, "amplitude.minimum_cases=6"), public_data("camelyon17")
    experiment = job.resolve(demo=False)
    (told,) = inspect(root, job, experiment, None).findings
    assert (told.severity, told.subject) == ("notice", "hospital1, hospital2")
    federation = InProcessFederation(experiment, job.sites, tmp_path / "run", dict.fromkeys(job.sites, root))
    federation.gather_amplitude()
    run = federation.run_state
    assert run.amplitude_sites == ["hospital3", "hospital4", "hospital5"]
    update = federation.participants["hospital1"].train(0, ModelMessage(federation.weights, run.amplitude))
    assert update.difference is not None and update.amplitude is None
    assert update.numbers["steps"] == 2  # 12 patches in batches of 8
    strict = job_of("camelyon17", *SHORT, "amplitude.minimum_cases=6", "amplitude.minimum_sites=4").resolve(demo=False)
    federation = InProcessFederation(strict, job.sites, tmp_path / "strict", dict.fromkeys(job.sites, root))
    with pytest.raises(SiteError, match=r"minimum_sites is 4 \(hospital1, hospital2 sent none\)"):
        federation.gather_amplitude()


def test_the_prostate_job_reads_both_names_of_a_site(tmp_path: Path) -> None:
    root, job = write_prostate(tmp_path, as_harmofl=True), job_of("prostate")
    places = place_sites(job.resolve(demo=False), dict.fromkeys(job.sites, root))
    assert {site: place.name for site, place in places.items() if isinstance(place, Path)} == {
        **{site: site for site in PROSTATE_CASES},
        "RUNMC": "ISBI",
        "BMC": "ISBI_1.5",
    }


def test_the_command_ends_with_0(
    public_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(costs, "LONGEST_MEASUREMENT", 0.01)
    small = ["--set", "network.width=4"]
    root = public_data("camelyon17")
    assert main(["check", str(root), "--job", str(JOBS / "harmofl_camelyon17"), *small]) == 0
    out = capsys.readouterr().out
    assert Counter(word for word in out.split() if word.startswith(("error", "warning"))) == Counter()
    assert "20 patches on 10 slides of 7 patients" in out
