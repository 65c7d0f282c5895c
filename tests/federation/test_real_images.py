"""Two sites of real MRI volumes and masks train two rounds; the images are copied to a temporary data root."""

import hashlib
import shutil
from pathlib import Path

from tests.federation.conftest import RunJob

# Pairs of image and mask: hippocampus (labels 0/1/2, integer and float files) and spine (other orientations, thick
# slices), with the prostate lesion whose mask is stored with its Y axis reversed.
SITES = {
    "BIDMC": [
        (f"mri_label012/msd_hippocampus/hippocampus_{number}.nii.gz", f"hippocampus_{number}_label.nii.gz")
        for number in ("001", "003", "007", "033")
    ],
    "HK": [
        ("mri_label012/sct_spine/sct_t2.nii.gz", "sct_t2_seg_manual.nii.gz"),
        ("mri_label012/sct_spine/sct_t2s.nii.gz", "sct_t2s_gmseg_manual.nii.gz"),
        ("mri_label012/sct_spine/sct_mt1.nii.gz", "sct_mt1_seg.nii.gz"),
        ("mri_prostate/prostatex/px_skyra_384_t2_tra.nii.gz", "px_skyra_384_lesion_flippedY.nii.gz"),
    ],
}

SETTINGS = {
    "data.height": 64,
    "data.width": 64,
    "amplitude.minimum_cases": 1,
    "network.width": 4,
    "training.learning_rate": 0.003,  # at the job's 1e-4 two rounds change the loss by less than its noise
    "training.batch_size": 4,
    "training.local_epochs": 2,
    "federation.rounds": 2,
}


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_real_volumes_train_two_rounds_and_are_left_alone(run_job: RunJob, realdata: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for site, pairs in SITES.items():
        (root / site).mkdir(parents=True)
        for number, (image, mask) in enumerate(pairs, start=1):
            shutil.copy(realdata / image, root / site / f"Case{number:02d}.nii.gz")
            shutil.copy((realdata / image).parent / mask, root / site / f"Case{number:02d}_Segmentation.nii.gz")
    before = digests(root)
    run = run_job(list(SITES), SETTINGS, demo=False, environment={"HARMOFL_DATA_ROOT": str(root)})
    assert run.code == 0, run.output
    assert "DEMO" not in run.output
    assert not run.results.demo
    assert run.results.sites_accepted == [["BIDMC", "HK"]] * 2
    for site in SITES:
        result = run.results.sites[site]
        assert sum(result.cases_used.values()) == 4 and result.cases_skipped == {}
        assert result.bytes_sent["amplitude"] == 3 * 11 * 4  # 3 channels x 11 half octaves of 64 pixels, float32
    # the difference of a loss shows that something was trained
    first, last = run.rounds[0].loss, run.rounds[-1].loss
    assert sum(last.values()) < sum(first.values()), (first, last)  # type: ignore[arg-type]
    assert digests(root) == before
