"""Subtraction of two jobs at a hospital: neither other fractions nor another folder isolate a patient's amplitude."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import set_key
from harmofl.flare.local_amplitude import RELEASES, build_normalization
from harmofl.flare.participant import Participant
from harmofl.flare.privacy_ledger import FOLDER, LEDGER_FILE, read_ledger
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.site_settings import SiteSettings
from harmofl.flare.split_memory import reset_split, split_settings
from harmofl.tasks import resolve_experiment

CASES = 11
# of 11 patients 7 train by the first and 8 by the second: 0.64 * 11 = 7.04, 0.68 * 11 = 7.48, 0.12 * 11 = 1.32
FIRST, SECOND = [0.64, 0.16, 0.2], [0.68, 0.12, 0.2]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    write_prostate_site(folder / "HK", "siemens_1.5t_endorectal", CASES + 1, 0, matrix=64, slices=3)
    return folder


@pytest.fixture
def make(cases: Path, written: dict[str, Any], tmp_path: Path) -> Callable[..., Participant]:
    """A hospital of 11 patients in a run of a job; with `more` one more case lies in its folder."""

    def participant(run: str, more: int = 0, simulated: bool = False, **changes: Any) -> Participant:
        root = tmp_path / "data" / "HK"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path in sorted((cases / "HK").iterdir())[: 2 * (CASES + more)]:
            (root / path.name).symlink_to(path)
        for key, value in changes.items():
            set_key(written, key.replace("__", "."), value)
        site = SiteConfig("HK", simulated, root.parent, tmp_path / "state", device="cpu")
        return Participant(resolve_experiment(written), site, run, lambda: False, logging.getLogger("HK"))

    return participant


def total_of(participant: Participant) -> tuple[np.ndarray, int]:
    """What a lead computes of what he gets: the sum over the images, and how many there are."""
    sent = participant.estimate_amplitude().amplitude
    assert sent is not None
    return sent.values.astype(np.float64) * sent.images, sent.images


def test_in_simulation_the_attack_isolates_a_patient(make: Any) -> None:
    """The attack works where nothing bounds it, so that the tests below test something."""
    first_job, second_job = (
        make(name, simulated=True, data__fractions=part) for name, part in (("a", FIRST), ("b", SECOND))
    )
    first, images = total_of(first_job)
    second, more = total_of(second_job)
    patients = [list(job.data.training_patients) for job in (first_job, second_job)]
    assert [len(set(held)) for held in patients] == [7, 8]
    [patient] = set(patients[1]) - set(patients[0])
    its_own = [second_job.data.training[item][0] for item, of in enumerate(patients[1]) if of == patient]
    assert more - images == len(its_own)
    normalization = build_normalization(second_job._experiment, 3, estimation="before_training")
    normalization.observe(torch.stack(its_own))
    np.testing.assert_allclose((second - first) / (more - images), normalization.local.mean.numpy(), atol=1e-4)


def test_a_job_with_other_fractions_is_refused_by_the_name_of_the_reset(make: Any) -> None:
    make("a", data__fractions=FIRST).estimate_amplitude()
    with pytest.raises(SiteError) as caught:
        make("b", data__fractions=SECOND).estimate_amplitude()
    assert caught.value.code == "split_differs"
    assert str(caught.value) == (
        "site HK: the first job's split of prostate stays until harmofl privacy KIT --reset-split prostate; this job "
        "has data.fractions 0.68, 0.12, 0.2 instead of 0.64, 0.16, 0.2"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "seed 1 instead of 0"),
        ({"data__split": "as_published"}, "data.split as_published instead of patient"),
        ({"data__patient_from": 5}, "data.patient_from 5 instead of name"),
        ({"data__patient_pattern": "^(Case0)"}, "another rule that finds the patient in a case's name"),
    ],
)
def test_a_job_that_would_split_otherwise_is_refused(make: Any, changes: dict[str, Any], said: str) -> None:
    assert make("a").data.patient_count == 7
    with pytest.raises(SiteError, match=said) as caught:
        make("b", **changes).data  # noqa: B018
    assert caught.value.code == "split_differs" and "Case0" not in str(caught.value)


def test_a_closed_form_of_a_job_decides_nothing_beside_the_sites_own_pattern(written: dict[str, Any]) -> None:
    own, told = SiteSettings(patient_pattern="^(Case[0-9]+)"), []
    for form in ("name", 5):
        set_key(written, "data.patient_from", form)
        told.append([split_settings(resolve_experiment(written), settings) for settings in (own, SiteSettings())])
    assert told[0][0] == told[1][0] and told[0][1] != told[1][1]


def test_after_a_reset_the_second_job_gets_the_first_ones_bits(make: Any, tmp_path: Path) -> None:
    first = make("a", data__fractions=FIRST).estimate_amplitude().amplitude
    assert reset_split(tmp_path / "state", "prostate")
    job = make("b", data__fractions=SECOND)
    assert job.data.patient_count == 8
    update = job.estimate_amplitude()
    assert update.amplitude is not None and first is not None
    assert update.amplitude.values.tobytes() == first.values.tobytes()
    assert (update.amplitude.images, update.amplitude.patients) == (first.images, 7)
    assert update.numbers[RELEASES] == {"new": 1, "repeated": 1, "withheld": 1}
    assert not reset_split(tmp_path / "state", "nuclei")
    ledger = read_ledger(tmp_path / "state")
    assert ledger is not None and [entry.task for entry in ledger.content.resets] == ["prostate"]


@pytest.mark.parametrize(
    "changes",
    [
        {"amplitude__region": "low"},
        {"data__height": 80, "data__width": 80},
        {"amplitude__intensity": "none"},
        {"reader__upper_percentile": 98.0},
    ],
)
def test_another_statistic_of_a_close_set_does_not_leave(
    make: Any, tmp_path: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    make("a", data__fractions=FIRST).estimate_amplitude()
    reset_split(tmp_path / "state", "prostate")
    update = make("b", data__fractions=SECOND, **changes).estimate_amplitude()
    assert update.amplitude is None and update.numbers[RELEASES] == {"new": 1, "repeated": 0, "withheld": 1}
    assert "it would tell about fewer than 5 patients; none is sent, and new patients wait" in caplog.text


def test_with_one_case_more_nobody_moves_and_the_earlier_statistic_is_sent(make: Any) -> None:
    before = make("a")
    first = before.estimate_amplitude().amplitude
    later = make("b", more=1)
    update = later.estimate_amplitude()
    parts = [
        {part: {case.patient for case in getattr(site.data, part)} for part in ("validation", "test")}
        | {"training": set(site.data.training_patients)}
        for site in (before, later)
    ]
    assert all(parts[0][part] <= parts[1][part] for part in parts[0])
    assert sum(len(part) for part in parts[1].values()) == CASES + 1
    assert update.amplitude is not None and first is not None
    assert update.amplitude.values.tobytes() == first.values.tobytes()
    assert make("c").estimate_amplitude().numbers[RELEASES]["new"] == 1


def test_a_run_that_goes_on_has_its_own_split(make: Any) -> None:
    first = make("a").estimate_amplitude()
    assert make("a", more=1).estimate_amplitude().numbers["cases"] != first.numbers["cases"]
    assert make("a").estimate_amplitude().numbers["cases"] == first.numbers["cases"]


def test_in_simulation_nothing_is_kept(make: Any, tmp_path: Path) -> None:
    for fractions in (FIRST, SECOND):
        numbers = make("a", simulated=True, data__fractions=fractions).estimate_amplitude().numbers
        assert RELEASES not in numbers
    assert not (tmp_path / "state" / FOLDER).exists()


def test_a_damaged_ledger_stops_every_task_of_the_site(make: Any, tmp_path: Path) -> None:
    make("a").estimate_amplitude()
    (tmp_path / "state" / FOLDER / LEDGER_FILE).write_text("{}")
    with pytest.raises(SiteError, match="privacy ledger .* is damaged") as caught:
        make("a").estimate_amplitude()
    assert caught.value.code == "privacy_ledger"


def test_a_hospital_that_lowers_its_own_limit_to_1_bounds_nothing(make: Any) -> None:
    outcomes = []
    for more in (0, 1):
        job = make(f"run{more}", more=more)
        job._site = replace(job._site, minimum_cases=1)
        outcomes.append(job.estimate_amplitude().numbers[RELEASES]["new"])
    assert outcomes == [1, 2]
