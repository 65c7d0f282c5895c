"""The breast histology task: how many patches of what, and scores by hand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from harmofl.data.findings import DataRootError
from harmofl.data.patch_index import read_index
from harmofl.data.patches import Patches, UnreadablePatchesError
from harmofl.data.synthetic_histology import MOST_SLIDES
from harmofl.experiment import Experiment
from harmofl.sections import ExperimentError
from harmofl.tasks.camelyon17 import TASK
from tests.wilds import row, write_index

JOB = "harmofl_camelyon17"
SMALL = {"data.height": 64, "data.width": 64, "reader.bad_share": 0.3}
Resolve = Callable[..., Experiment]


@pytest.fixture
def experiment(resolve_job: Resolve) -> Experiment:
    return resolve_job(JOB, SMALL)


def patch(folder: Path, number: int) -> Path:
    """The file of a row of `write_patches`, whose patients have 4 patches each."""
    case = f"patient_{number // 4:03d}_node_1"
    return folder / f"patches/{case}/patch_{case}_x_{number}_y_{2 * number}.png"


def write_patches(folder: Path, count: int, *, center: int = 0, tumor: Callable[[int], int] = lambda n: n % 2) -> Path:
    """Patches of 64 x 64 pixels, four of a patient and slide; each red value tells the row."""
    lines = [
        row(number, f"{number // 4:03d}", tumor(number), str(number // 4), center=center, split=int(number < 3))
        for number in range(count)
    ]
    write_index(folder, *lines)
    for number in range(count):
        path = patch(folder, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (64, 64), (number, 0, 200, 255)).save(path)
    return folder


class TestOpenSite:
    def test_patients_stay_together_and_only_the_sites_centers_are_read(
        self, experiment: Experiment, tmp_path: Path
    ) -> None:
        folder = write_patches(tmp_path, 40)
        with (folder / "metadata.csv").open("a") as stream:
            stream.write(row(99, "700", center=1) + "\n")  # no such file: it would be found bad
        data = TASK.open_site(folder, "hospital1", experiment, tmp_path / "cache")
        parts = {"training": data.training, "validation": data.validation, "test": data.test}
        assert data.cases == {name: len(part) for name, part in parts.items()}
        assert sum(data.cases.values()) == 40 and min(data.cases.values()) > 0
        patients = [set(part.index.patient[part.rows].tolist()) for part in parts.values()]
        assert sum(map(len, patients)) == len(set().union(*patients)) == 10
        assert data.patient_count == len(patients[0])
        assert data.skipped() == {} and data.findings == []
        assert not (tmp_path / "cache").exists()
        image, label = data.training[0]
        assert image.shape == (3, 64, 64) and label.item() in (0, 1)

    def test_the_published_split_cuts_patches_and_warns(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {**SMALL, "data.split": "as_published"})
        data = TASK.open_site(write_patches(tmp_path, 40), "hospital1", experiment, tmp_path)
        # 40 * 0.64 = 25.6, 40 * 0.8 = 32
        assert data.cases == {"training": 25, "validation": 7, "test": 8}
        assert [(finding.severity, finding.code) for finding in data.findings] == [("warning", "patch_leakage")]

    def test_bad_patches_are_named_and_counted_before_training(self, experiment: Experiment, tmp_path: Path) -> None:
        folder = write_patches(tmp_path, 40)
        patch(folder, 3).unlink()
        patch(folder, 37).write_bytes(patch(folder, 37).read_bytes()[:50])
        data = TASK.open_site(folder, "hospital1", experiment, tmp_path)
        assert data.skipped() == {"missing_image": 1, "unreadable_image": 1}
        named = {finding.code: finding for finding in data.findings}
        assert set(named) == {"missing_image", "unreadable_image"}
        for code, number in (("missing_image", 3), ("unreadable_image", 37)):
            assert named[code].severity == "error"
            assert named[code].subject == patch(folder, number).relative_to(folder).as_posix()
        for part in (data.training, data.validation, data.test):
            reds = {round(float(image[0, 0, 0]) * 255) for image, _ in part}
            assert reds and not reds & {3, 37}

    def test_patches_that_go_bad_later_are_counted_and_named(self, experiment: Experiment, tmp_path: Path) -> None:
        folder = write_patches(tmp_path, 40)
        data = TASK.open_site(folder, "hospital1", experiment, tmp_path)
        patch(folder, int(data.training.rows[0])).unlink()
        assert data.skipped() == {} and data.late_findings() == []
        data.training[0]
        assert data.skipped() == {"missing_image": 1} and list(data.unreadable()) == [0]
        [late] = data.late_findings()
        assert late.subject == patch(folder, int(data.training.rows[0])).relative_to(folder).as_posix()

    def test_beyond_the_limit_the_site_fails_in_one_line(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {**SMALL, "reader.bad_share": 0.0})
        folder = write_patches(tmp_path, 40)
        patch(folder, 0).unlink()
        with pytest.raises(UnreadablePatchesError, match=r"0 % may; the last was patches/patient_000.*") as caught:
            TASK.open_site(folder, "hospital1", experiment, tmp_path)
        assert "\n" not in str(caught.value)

    def test_a_patient_alone_gives_training_only(self, experiment: Experiment, tmp_path: Path) -> None:
        data = TASK.open_site(write_patches(tmp_path, 4), "hospital1", experiment, tmp_path)
        assert data.cases == {"training": 4, "validation": 0, "test": 0}
        assert [(finding.severity, finding.code) for finding in data.findings] == [("error", "too_few_cases")]
        assert TASK.evaluate(lambda images: images.mean((2, 3))[:, :2], data.test, workers=0).key_score is None


class TestInspect:
    def test_patches_by_center_label_and_the_files_own_split(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {**SMALL, "reader.centers": {"hospital1": [0, 2]}})
        folder = write_patches(tmp_path, 40, tumor=lambda number: int(number % 4 == 3))
        report = TASK.inspect(folder, "hospital1", resolve_job(JOB, SMALL))
        assert report.columns == ("center", "label", "split in the file", "patches")
        # rows 0 to 2 are of the file's split 1 and normal; of 40 rows every fourth is tumor
        assert report.rows == (("0", "normal", "0", "27"), ("0", "normal", "1", "3"), ("0", "tumor", "0", "10"))
        parts = [report.training_images, report.validation_images, 40 - report.training_images]
        parts[2] -= report.validation_images
        assert report.summary == (
            f"40 patches on 10 slides of 10 patients: {parts[0]} training, {parts[1]} validation, {parts[2]} test"
        )
        assert report.findings == () and report.bytes_held == 0 and report.pixels == {}
        assert report.training_images == 4 * report.training_patients
        with pytest.raises(DataRootError, match=r"no row of center 2 \(it has 0, counted from 0\)"):
            TASK.inspect(folder, "hospital1", experiment)

    def test_what_it_says_is_what_training_opens(self, experiment: Experiment, tmp_path: Path) -> None:
        folder = write_patches(tmp_path, 40)
        patch(folder, 5).unlink()
        Image.new("L", (64, 64), 9).save(patch(folder, 6))
        report = TASK.inspect(folder, "hospital1", experiment)
        data = TASK.open_site(folder, "hospital1", experiment, tmp_path)
        assert (report.training_images, report.validation_images) == (data.cases["training"], data.cases["validation"])
        assert report.training_patients == data.patient_count
        codes = sorted((finding.code, finding.subject) for finding in report.findings)
        assert codes == sorted((finding.code, finding.subject) for finding in data.findings)
        subjects = [patch(folder, number).relative_to(folder).as_posix() for number in (6, 5)]
        assert codes == list(zip(["converted_image", "missing_image"], subjects, strict=True))


# Evidence for tumor (logit of class 1 minus logit of class 0) of rows 0 to 7; odd rows are tumor, rows 0 to 3 one
# slide, 4 to 7 the other. Wrong are 1 and 5 (tumor missed) and 4 (normal called tumor).
EVIDENCE = (-3.0, -2.5, -1.0, 2.0, 1.0, -0.5, -2.0, 3.0)


def predict(images: Tensor) -> Tensor:
    numbers = (images[:, 0, 0, 0] * 255).round().long()
    evidence = torch.tensor(EVIDENCE)[numbers]
    return torch.stack((-evidence / 2, evidence / 2), 1)


class TestEvaluate:
    def scored(self, folder: Path, bad_share: float = 0.5) -> Patches:
        index = read_index(folder, [0])
        return Patches(index, np.arange(len(index)), 64, 64, bad_share)

    @pytest.mark.parametrize("at_once", [3, 512])
    def test_scores_by_hand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
        monkeypatch.setattr("harmofl.tasks.camelyon17.AT_ONCE", at_once)
        result = TASK.evaluate(predict, self.scored(write_patches(tmp_path, 8)), workers=0)
        values = {name: (estimate.value, estimate.n) for name, estimate in result.pooled.items()}
        # of 4 x 4 pairs tumor above normal: row 1 wins 1, row 3 wins 4, row 5 wins 3, row 7 wins 4: 12 of 16
        assert values == {
            "accuracy": (5 / 8, 8),
            "auroc": (pytest.approx(12 / 16), 8),
            "sensitivity": (2 / 4, 4),
            "specificity": (3 / 4, 4),
        }
        assert result.scores == {"accuracy_by_slide": [3 / 4, 2 / 4]}
        assert result.key_score == 5 / 8
        # two slides of a patient each: 3 of 4 and 2 of 4 are right, too few for an interval
        accuracy = result.pooled["accuracy"]
        assert (accuracy.by_patient, accuracy.no_interval) == (((3, 4), (2, 4)), "too_few")
        assert result.patients == [0, 1]

    def test_slides_of_one_patient_are_one_unit(self, tmp_path: Path) -> None:
        slides = {0: "000", 1: "000", 2: "001", 3: "002"}  # the first two slides are lymph nodes of one patient
        lines = [row(n, slides[n // 4], n % 2, str(n // 4), center=0) for n in range(16)]
        write_index(tmp_path, *lines)
        split = self.scored(tmp_path)
        for name in (split.index.name(n) for n in range(16)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (64, 64)).save(tmp_path / name)
        result = TASK.evaluate(predict, split, workers=0)
        assert result.patients == [0, 0, 1, 2] and len(result.scores["accuracy_by_slide"]) == 4
        assert [of for _, of in result.pooled["accuracy"].by_patient] == [8, 4, 4]
        assert [of for _, of in result.pooled["sensitivity"].by_patient] == [4, 2, 2]
        assert result.pooled["accuracy"].patients == 3

    @pytest.mark.parametrize("workers", [0, 1])
    def test_stand_ins_of_bad_patches_are_not_scored(self, tmp_path: Path, workers: int) -> None:
        folder = write_patches(tmp_path, 8)
        patch(folder, 0).unlink()  # was right; its stand-in, row 2, is right too and must not count twice
        result = TASK.evaluate(predict, self.scored(folder), workers=workers)
        assert (result.pooled["accuracy"].value, result.pooled["accuracy"].n) == (4 / 7, 7)
        assert (result.pooled["specificity"].value, result.pooled["specificity"].n) == (2 / 3, 3)
        assert result.pooled["sensitivity"].n == 4
        assert result.scores == {"accuracy_by_slide": [2 / 3, 2 / 4]}

    def test_with_one_class_what_needs_two_stays_undefined(self, tmp_path: Path) -> None:
        result = TASK.evaluate(predict, self.scored(write_patches(tmp_path, 8, tumor=lambda _: 0)), workers=0)
        # called normal: rows 0, 1, 2, 5, 6
        assert result.pooled["accuracy"].value == result.pooled["specificity"].value == result.key_score == 5 / 8
        for name in ("sensitivity", "auroc"):
            estimate = result.pooled[name]
            assert all(math.isnan(value) for value in (estimate.value, estimate.low, estimate.high))
        assert result.pooled["sensitivity"].n == 0


class TestDemo:
    def test_what_is_written_is_read_back(self, resolve_job: Resolve, tmp_path: Path) -> None:
        demo: dict[str, Any] = {"data.height": 64, "data.width": 64, "demo.data.slides": 5, "demo.data.patches": 20}
        experiment = resolve_job(JOB, demo, demo=True)
        means = {}
        for site, center in (("hospital1", 0), ("hospital4", 3)):
            TASK.write_demo(tmp_path / site, site, experiment)
            data = TASK.open_site(tmp_path / site, site, experiment, tmp_path)
            # 4 patches on each of 5 slides, each of a patient of its own
            assert sum(data.cases.values()) == 20 and min(data.cases.values()) >= 4
            assert data.patient_count == data.cases["training"] // 4
            assert data.skipped() == {}
            assert not [finding for finding in data.findings if finding.severity != "notice"]
            assert set(data.training.labels.tolist()) == set(data.test.labels.tolist()) == {0, 1}
            assert set(data.training.index.center.tolist()) == {center}
            means[site] = torch.stack([image for image, _ in data.training]).mean((0, 2, 3))
        # purple gray against crimson: the second is darker in green by far more than two sites of one laboratory
        assert means["hospital1"][1] - means["hospital4"][1] > 0.1

    def test_a_site_without_a_laboratory_gets_one_by_its_center(self, resolve_job: Resolve, tmp_path: Path) -> None:
        small = {"demo.data.slides": 3, "demo.data.patches": 6, "data.height": 64, "data.width": 64}
        experiment = resolve_job(JOB, {**small, "demo.data.laboratories": {}}, demo=True)
        for site in ("hospital1", "hospital2"):
            TASK.write_demo(tmp_path / site, site, experiment)
        first, second = (
            [np.asarray(Image.open(path)) for path in sorted((tmp_path / site).rglob("*.png"))]
            for site in ("hospital1", "hospital2")
        )
        assert len(first) == len(second) == 6
        assert abs(np.mean(first) - np.mean(second)) > 2

    def test_a_site_of_several_centers_gets_patches_of_each(self, resolve_job: Resolve, tmp_path: Path) -> None:
        small = {"demo.data.slides": 6, "demo.data.patches": 12, "data.height": 64, "data.width": 64}
        centers = {"reader.centers": {"hospital1": [0, 3]}, "demo.data.laboratories": {"hospital1": "crimson"}}
        experiment = resolve_job(JOB, small | centers, demo=True)
        TASK.write_demo(tmp_path / "hospital1", "hospital1", experiment)
        index = read_index(tmp_path / "hospital1", (0, 3))
        assert sorted(index.center.tolist()) == [0] * 6 + [3] * 6
        data = TASK.open_site(tmp_path / "hospital1", "hospital1", experiment, tmp_path / "cache")
        assert sum(data.cases.values()) == 12 and data.skipped() == {}
        many = resolve_job(JOB, small | centers | {"reader.centers": {"hospital1": list(range(7))}}, demo=True)
        with pytest.raises(
            ExperimentError,
            match=r"demo\.data\.slides: 6, .* too few for centers 0, 1, 2, 3, 4, 5, 6 of site hospital1",
        ):
            TASK.write_demo(tmp_path / "other", "hospital1", many)

    def test_an_unknown_laboratory_is_answered_with_the_known_ones(self, resolve_job: Resolve, tmp_path: Path) -> None:
        experiment = resolve_job(JOB, {"demo.data.laboratories": {"hospital1": "crimsom"}}, demo=True)
        with pytest.raises(
            ExperimentError, match=r"demo\.data\.laboratories\.hospital1: 'crimsom' is none of .*crimson"
        ):
            TASK.write_demo(tmp_path / "hospital1", "hospital1", experiment)

    def test_a_slide_more_would_have_the_number_of_the_next_hospital_s_first(self, resolve_job: Resolve) -> None:
        assert MOST_SLIDES == 20
        resolve_job(JOB, {"demo.data.slides": 20}, demo=True)
        with pytest.raises(ExperimentError, match=r"demo\.data\.slides: .*20, not 21"):
            resolve_job(JOB, {"demo.data.slides": 21}, demo=True)
