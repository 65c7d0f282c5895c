"""What a site computes and what it keeps to itself, without FLARE."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from harmofl.core.exchange import from_exchange_types, to_exchange_types
from harmofl.core.parallel import ALONE
from harmofl.core.partition import partition_of
from harmofl.core.training import (
    NotFiniteError,
    RoundSettings,
    TrainingStoppedError,
    _augmented_batches,
    arrays_sha256,
    seed_of,
    state_arrays,
)
from harmofl.data.findings import Finding
from harmofl.data.synthetic import write_prostate_site
from harmofl.experiment import Experiment, set_key
from harmofl.flare.participant import Participant
from harmofl.flare.progress import log_findings
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.wire import Arrays, ModelMessage, SiteNumbers
from harmofl.tasks import resolve_experiment, untrained_network
from harmofl.tasks.answers import Evaluation
from harmofl.tasks.prostate import TASK
from tests.loose_limits import LOOSE

CASES = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_prostate_site(folder / "HK", "siemens_1.5t_endorectal", CASES, 0, matrix=64, slices=4)
    return folder


@pytest.fixture
def experiment(written: dict[str, Any]) -> Experiment:
    set_key(written, "amplitude.minimum_cases", 1)
    return resolve_experiment(written)


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Callable[..., Participant]:
    """A participant of site HK; `site` changes its own settings."""

    def participant(experiment: Experiment, stop: bool = False, **site: Any) -> Participant:
        own = SiteConfig(
            "HK", simulated=False, data_root=root, state_root=tmp_path, device="cpu", minimum_cases=1, settings=LOOSE
        )
        return Participant(experiment, replace(own, **site), "run", lambda: stop, logging.getLogger("HK"))

    return participant


def weights_of(experiment: Experiment) -> Arrays:
    return state_arrays(untrained_network(experiment))


def sent_weights(experiment: Experiment, weights: Arrays | None = None) -> Arrays:
    """Weights in the types in which the experiment's server sends them."""
    network = untrained_network(experiment)
    statistics = partition_of(network, experiment.federation.local_layers).statistics
    return to_exchange_types(weights or state_arrays(network), experiment.federation.exchange, statistics)


def test_a_round_answers_with_the_difference_and_what_was_received(experiment: Experiment, make: Any) -> None:
    site = make(experiment)
    amplitude = site.estimate_amplitude().amplitude
    weights = weights_of(experiment)
    update = site.train(0, ModelMessage(weights, amplitude))
    assert update.numbers["received_sha256"] == arrays_sha256(dict(weights))
    assert update.amplitude is None, "nothing extra goes up once the amplitude is frozen"
    assert update.difference is not None and update.difference.keys() == weights.keys()
    assert any(np.abs(change).max() > 0 for change in update.difference.values())
    # 8 cases: 64/16/20 % of a block of 25
    assert sum(update.numbers["cases"].values()) == CASES and update.numbers["steps"] > 0


@pytest.mark.parametrize(("asked", "found"), [("auto", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_site_says_what_its_device_computes_in(written: dict[str, Any], make: Any, asked: str, found: str) -> None:
    set_key(written, "training.precision", asked)
    experiment = resolve_experiment(written)
    numbers = make(experiment, device="cpu").train(0, ModelMessage(weights_of(experiment))).numbers
    assert SiteNumbers.model_validate(numbers).precision == found


def test_a_new_process_goes_on_with_the_moments_and_an_old_state_is_not_mixed_up(
    experiment: Experiment, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(experiment)
    together = make(experiment)
    message = ModelMessage(weights, together.estimate_amplitude().amplitude)
    together.train(0, message)
    second = together.train(1, message).difference
    again = make(experiment).train(1, message).difference  # same state folder, another object, as another process
    assert all(np.array_equal(second[name], again[name]) for name in weights)
    without = make(experiment).train(5, message)
    assert without.difference is not None and "no state of round 4; moments start anew" in caplog.text


class Told(type(TASK)):  # type: ignore[misc]
    """The prostate task, but a split's score is what was said beforehand."""

    def __init__(self, scores: dict[int, float]) -> None:
        self._scores = scores

    def evaluate(self, predict: Any, split: Any, *, workers: int) -> Evaluation:
        score = self._scores[id(split)]
        return Evaluation(score, {"dice": [score]})


def test_validation_is_scored_on_validation_cases_and_the_test_on_test_cases(experiment: Experiment, make: Any) -> None:
    site = make(experiment)
    names = {part: {case.volume.name for case in getattr(site.data, part)} for part in ("validation", "test")}
    assert names["validation"] and names["test"] and not names["validation"] & names["test"]
    site._task = Told({id(site.data.validation): 0.25, id(site.data.test): 0.75})
    message = ModelMessage(weights_of(experiment), site.estimate_amplitude().amplitude)
    assert site.train(0, message).numbers["validation"] == 0.25
    last = site.evaluate(ModelMessage(message.weights, message.amplitude, best_weights=message.weights)).numbers
    assert last["validation"] == 0.25
    assert last["test"] == {"final": {"dice": [0.75]}, "best": {"dice": [0.75]}}


@pytest.mark.parametrize(("own", "job", "sent"), [(1, 1, True), (CASES, 1, False), (1, CASES, False)])
def test_the_stricter_minimum_holds_back_the_amplitude(
    written: dict[str, Any], make: Any, own: int, job: int, sent: bool
) -> None:
    set_key(written, "amplitude.minimum_cases", job)
    update = make(resolve_experiment(written), minimum_cases=own).estimate_amplitude()
    assert (update.amplitude is not None) == sent
    assert update.numbers["cases"]["training"] < CASES


def test_cases_of_one_patient_count_once(written: dict[str, Any], make: Any) -> None:
    set_key(written, "amplitude.minimum_cases", 2)
    set_key(written, "data.patient_pattern", "^(Case)")  # all cases are one patient's
    site = make(resolve_experiment(written))
    assert site.data.patient_count == 1
    assert site.estimate_amplitude().amplitude is None


def test_a_first_batch_smaller_than_the_sites_minimum_stays_at_the_site(written: dict[str, Any], make: Any) -> None:
    # with seed 1 the first two images are of two patients
    changes = {"seed": 1, "amplitude.preset": "as_published", "training.batch_size": 2, "amplitude.minimum_cases": 2}
    for key, value in changes.items():
        set_key(written, key, value)
    experiment = resolve_experiment(written)
    for own, sent in ((2, True), (3, False)):
        root = make(experiment)._site.state_root / str(own)
        update = make(experiment, minimum_cases=own, state_root=root).train(0, ModelMessage(weights_of(experiment)))
        assert (update.amplitude is not None) == sent, own


def test_test_scores_come_of_both_models_and_name_no_case(experiment: Experiment, make: Any) -> None:
    weights = weights_of(experiment)
    update = make(experiment).evaluate(ModelMessage(weights, None, best_weights=weights))
    assert update.difference is None
    # untrained and equal; NaN where a case holds no prostate
    np.testing.assert_equal(update.numbers["test"]["final"], update.numbers["test"]["best"])
    assert "Case" not in str(update.numbers)


def test_a_site_without_a_case_to_train_on_refuses(experiment: Experiment, make: Any, tmp_path: Path) -> None:
    (tmp_path / "empty" / "HK").mkdir(parents=True)
    with pytest.raises(SiteError) as caught:
        make(experiment, data_root=tmp_path / "empty").estimate_amplitude()
    assert caught.value.code == "no_data" and str(tmp_path) not in str(caught.value)


def test_cases_that_come_during_a_run_are_a_warning(
    experiment: Experiment, make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new process, or a job that goes on with a run, reads the folder anew and may split it otherwise."""
    root = tmp_path / "grows"
    write_prostate_site(root / "HK", "siemens_1.5t_endorectal", CASES, 0, matrix=64, slices=4)
    for _ in range(2):
        assert make(experiment, data_root=root).estimate_amplitude().numbers["warnings"] == {}
    for suffix in ("", "_segmentation"):
        source = root / "HK" / f"Case00{suffix}.nii.gz"
        source.with_name(f"Case90{suffix}.nii.gz").write_bytes(source.read_bytes())
    assert make(experiment, data_root=root).estimate_amplitude().numbers["warnings"] == {"split_changed": 1}
    assert "the cases are not those that this run began with" in caplog.text
    other_run = make(experiment, data_root=root, state_root=tmp_path / "other_run")
    assert other_run.estimate_amplitude().numbers["warnings"] == {}


def test_every_line_of_a_site_names_it(experiment: Experiment, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    # all sites of a simulation share one console
    caplog.set_level(logging.INFO)
    participant = make(experiment)
    participant.data.findings.extend(Finding(kind, "a", "Case07", "left") for kind in ("warning", "notice"))
    log_findings("HK", participant.data.findings)
    late = replace(participant.data, late_findings=lambda: [Finding("error", "b", "Case08", "gone")])
    vars(participant)["data"] = late
    message = ModelMessage(weights_of(experiment), participant.estimate_amplitude().amplitude)
    participant.train(5, message)
    lines = [record.getMessage() for record in caplog.records if record.name in ("HK", "harmofl.findings")]
    for part in ("warning: Case07: left", "error: Case08: gone", "notice: ", "moments start anew"):
        assert [line for line in lines if part in line], part
    assert [line for line in lines if not line.startswith("HK: ")] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_warnings_about_data_leave_as_counts_by_code(experiment: Experiment, make: Any) -> None:
    participant = make(experiment)
    found = [
        Finding(kind, code, "Case07", "left") for kind, code in (("warning", "a"), ("warning", "a"), ("notice", "b"))
    ]
    participant.data.findings[:] = found
    told = participant.evaluate(ModelMessage(weights_of(experiment))).numbers
    assert told["warnings"] == {"a": 2} and "Case07" not in str(told)


def test_a_missing_gpu_is_named(experiment: Experiment, make: Any) -> None:
    with pytest.raises(SiteError, match="set device to auto or cpu"):
        make(experiment, device="cuda").train(0, ModelMessage(weights_of(experiment)))


@pytest.mark.slow  # the network is traced
def test_a_missing_compiler_is_named(
    experiment: Experiment, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(SiteError, match="site HK: torch.compile failed .* or set compile to false in") as caught:
        make(experiment, compile=True).train(0, ModelMessage(weights_of(experiment)))
    assert caught.value.code == "compile" and "\n" not in str(caught.value)


def test_a_stop_is_followed_between_batches(experiment: Experiment, make: Any) -> None:
    with pytest.raises(TrainingStoppedError):
        make(experiment, stop=True).estimate_amplitude()


def test_demo_data_of_other_settings_is_not_taken_from_a_kept_state_root(written: dict[str, Any], make: Any) -> None:
    written["demo"] = {"data": {"cases": 4, "matrix": 64, "slices": 3}}
    statistics = []
    for seed in (0, 1):
        set_key(written, "seed", seed)
        set_key(written, "amplitude.minimum_cases", 1)
        experiment = resolve_experiment(written, demo=True)
        site = make(experiment, simulated=True, data_root=None)
        statistics.append(site.estimate_amplitude().amplitude.values)
    assert not np.array_equal(*statistics)


@pytest.fixture
def broken(written: dict[str, Any]) -> tuple[Experiment, Arrays]:
    """An experiment with batch norm, and weights of it with a variance below 0."""
    for key, value in {"method": "fedavg", "network.norm": "batch", "federation.exchange": "float16"}.items():
        set_key(written, key, value)
    experiment = resolve_experiment(written)
    weights = sent_weights(experiment)
    name = next(name for name in weights if name.endswith("running_var"))
    return experiment, {**weights, name: np.full_like(weights[name], -1)}


def test_a_model_whose_output_is_not_finite_is_no_background(broken: Any, make: Any) -> None:
    experiment, weights = broken
    site, good = make(experiment), sent_weights(experiment)
    # 8 cases of 4 slices: a volume at a time is predicted
    said = r"model cannot be scored on {} data: the model's output is not finite for 4 of 4 images; lower training"
    with pytest.raises(NotFiniteError, match="the received " + said.format("validation")):
        site.train(0, ModelMessage(weights))
    with pytest.raises(NotFiniteError, match="the final " + said.format("validation")):
        site.evaluate(ModelMessage(weights, None, best_weights=good))
    with pytest.raises(NotFiniteError, match="the best " + said.format("test")):
        site.evaluate(ModelMessage(good, None, best_weights=weights))


def test_running_statistics_leave_a_site_as_they_are(broken: Any, make: Any) -> None:
    experiment, _ = broken
    difference = make(experiment).train(0, ModelMessage(sent_weights(experiment))).difference
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in difference.items()}
    assert kinds["running_mean"] == kinds["running_var"] == np.float32 and kinds["num_batches_tracked"] == np.int64
    assert kinds["weight"] == kinds["bias"] == np.float16


def test_a_site_sends_float16_where_the_job_says_so(written: dict[str, Any], make: Any, tmp_path: Path) -> None:
    set_key(written, "amplitude.minimum_cases", 1)
    answers, weights = {}, weights_of(resolve_experiment(written))
    for exchange in ("float32", "float16"):
        set_key(written, "federation.exchange", exchange)
        experiment = resolve_experiment(written)
        site = make(experiment, state_root=tmp_path / exchange)
        # the same numbers for both: those that float16 has
        start = sent_weights(experiment, from_exchange_types(to_exchange_types(weights, "float16", frozenset())))
        update = site.train(0, ModelMessage(start, site.estimate_amplitude().amplitude))
        answers[exchange] = update.difference
    full, half = answers["float32"], answers["float16"]
    assert {value.dtype for value in half.values()} == {np.dtype(np.float16)}
    # training itself is the same: what it changed is rounded to nearest on the way out
    assert all(np.array_equal(full[name].astype(np.float16), half[name]) for name in full)


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Stands in for a site's images: each is its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, 2, 2), torch.tensor(index)


@pytest.mark.parametrize("seed", [0, 4, 7])
def test_a_first_batch_counts_the_patients_whose_images_it_holds(written: dict[str, Any], make: Any, seed: int) -> None:
    changes = {
        "seed": seed,
        "amplitude.preset": "as_published",
        "training.batch_size": 4,
        "training.augmentation": "none",
        "amplitude.minimum_cases": 1,
    }
    for key, value in changes.items():
        set_key(written, key, value)
    experiment = resolve_experiment(written)
    site = make(experiment)
    sent = site.train(0, ModelMessage(weights_of(experiment))).amplitude
    # drawn again by the loader that training draws from
    how = RoundSettings(4, 1, "none", None, "float32")
    numbers, cpu = Numbers(len(site.data.training)), torch.device("cpu")
    first = next(iter(_augmented_batches(numbers, how, seed_of(seed, "HK", 0), cpu, ALONE)))[1].tolist()
    patients = len({site.data.training_patients[item] for item in first})
    assert (sent.patients, sent.images) == (patients, 4)
    # with these seeds, 3 or 2: so that images are not taken for patients
    assert patients < 4
    assert make(experiment, minimum_cases=patients + 1).train(0, ModelMessage(weights_of(experiment))).amplitude is None


def test_images_without_contrast_are_counted_in_the_answer(
    experiment: Experiment, make: Any, root: Path, tmp_path: Path
) -> None:
    site = make(experiment)
    clean = site.estimate_amplitude()
    assert "blank_image" not in clean.numbers["warnings"]
    spoiled = tmp_path / "blank" / "HK"
    shutil.copytree(root / "HK", spoiled)
    for path in spoiled.glob("*[0-9].nii.gz"):
        image = nibabel.load(path)
        voxels = np.asarray(image.dataobj).copy()
        slices = [axis for axis, code in enumerate(nibabel.aff2axcodes(image.affine)) if code in "SI"][0]
        np.moveaxis(voxels, slices, 0)[1] = voxels.min()  # of four: windows 0, 1 and 2 hold it
        nibabel.save(nibabel.Nifti1Image(voxels, image.affine, image.header), path)
    site = make(experiment, data_root=tmp_path / "blank", state_root=tmp_path / "other")
    found = site.estimate_amplitude()
    windows = {index for _, index in site.data.training.keys}
    assert windows == {0, 1, 2, 3}, "every slice of these phantoms shows prostate"
    assert found.numbers["warnings"]["blank_slices"] == CASES
    assert found.numbers["warnings"]["blank_image"] == 3 * found.numbers["cases"]["training"]
    assert [finding.subject for finding in site.data.findings if finding.code == "blank_slices"][0] == "Case00.nii.gz"
    # the answer to another task, by another process, says so too
    again = make(experiment, data_root=tmp_path / "blank", state_root=tmp_path / "other")
    answer = again.evaluate(ModelMessage(weights_of(experiment), found.amplitude))
    assert answer.numbers["warnings"] == found.numbers["warnings"]
    # slice 1 is in no channel of the mean, which is near that of the volumes as they were
    assert np.abs(found.amplitude.values - clean.amplitude.values).max() < 0.5
