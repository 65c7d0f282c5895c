"""harmofl check on small synthetic sites."""

import json
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from harmofl.app import costs
from harmofl.app.cli import main
from harmofl.data.scanners import SCANNERS
from harmofl.flare.privacy_ledger import KeptSplit, open_ledger
from tests.small_job import write_site
from tests.unit.app.provisioned import set_privacy


@pytest.fixture(autouse=True)
def _one_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LONGEST_MEASUREMENT", 0.0)


@pytest.fixture
def own_root(tmp_path: Path, sites_root: Path) -> Path:
    """A copy of the two sites that a test may break."""
    root = tmp_path / "own"
    shutil.copytree(sites_root, root)
    return root


def run(root: Path, job: Path, *more: str) -> int:
    return main(["check", str(root), "--job", str(job), *more])


def test_a_good_root_shows_every_site_case_and_cost(
    sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sites_root, job) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"site BIDMC: {sites_root / 'BIDMC'}" in shown.out and f"site HK: {sites_root / 'HK'}" in shown.out
    row = next(line for line in shown.out.splitlines() if line.startswith("Case00"))
    assert "4 x 64 x 64" in row and row.split()[-1] in ("train", "val", "test")
    # 3 cases of 4 slices of 64 x 64 at 2 bytes for the image and 1 for the mask: 147456 bytes = 0.14 MiB
    assert "HK: 0.1 MiB of images held in memory" in shown.out
    assert "3 cases: 1 training, 1 validation, 1 test; 12 slices" in shown.out
    assert "memory: about" in shown.out and "a round about" in shown.out
    assert "error" not in shown.out


def test_one_sites_folder_is_checked_under_its_name(
    sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sites_root / "HK", job) == 0
    out = capsys.readouterr().out
    assert "site HK: " in out and "BIDMC" not in out


def test_a_folder_of_no_sites_name_is_said_to_be_taken_for_one_sites(
    own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of all sites refuses a collection in one folder, so check must not look as if it were fine."""
    (own_root / "HK").rename(own_root / "collection")
    assert run(own_root / "collection", job) == 0
    told = "notice: collection: taken for the folder of one site, whichever of BIDMC, HK that is; to run all sites on"
    assert told in capsys.readouterr().out


def test_site_restricts(sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sites_root, job, "--site", "HK") == 0
    assert "BIDMC" not in capsys.readouterr().out


def test_an_alias_names_the_site(
    sites_root: Path, job: Path, own_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job / "app/config/experiment.json"
    settings = json.loads(path.read_text())
    settings["data"]["aliases"] = {"HK": ["kowloon"]}
    path.write_text(json.dumps(settings))
    (own_root / "HK").rename(own_root / "Kowloon")
    assert run(own_root, job) == 0
    assert f"site HK: {own_root / 'Kowloon'}" in capsys.readouterr().out


def test_an_unusable_case_is_an_error_with_its_fix(
    own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_root / "HK/Case01_segmentation.nii.gz").unlink()
    assert run(own_root, job) == 1
    lines = capsys.readouterr().out.splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith("site HK"))
    assert lines[place + 1].startswith("error: Case01.nii.gz: the image has no mask; add Case01_segmentation.nii.gz")
    assert lines[-1].startswith("errors were found")


def test_slices_without_contrast_are_named_with_their_volume(
    own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = own_root / "HK/Case01.nii.gz"
    image = nibabel.load(path)
    voxels = np.asarray(image.dataobj).copy()
    voxels[:, :, -1] = 0
    nibabel.save(nibabel.Nifti1Image(voxels, image.affine, image.header), path)
    assert run(own_root, job) == 0
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "no contrast" in line]
    depth = voxels.shape[2]
    assert line.startswith(f"warning: Case01.nii.gz: 1 of {depth} slices has no contrast (from the feet: ")
    assert line.endswith(") and is left out of the amplitude; leave out slices that show nothing")


def test_a_missing_site_is_an_error(own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(own_root / "HK")
    assert run(own_root, job) == 1
    out = capsys.readouterr().out
    assert "error: no data for site HK" in out and "--site" in out and "site BIDMC: " in out


def test_dicom_is_answered_once_with_the_conversion(
    tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = tmp_path / "dicom/series"
    series.mkdir(parents=True)
    (series / "0001").write_bytes(bytes(128) + b"DICM" + bytes(8))
    assert run(tmp_path / "dicom", job) == 1
    out = capsys.readouterr().out
    assert out.count("dcm2niix") == 1


def test_pixels_of_another_size_are_a_warning(own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # one image cropped to 48 of 64 columns: at the job's 64 columns its pixels are 25 % smaller, 33 % apart
    import nibabel

    for name in ("Case00.nii.gz", "Case00_segmentation.nii.gz"):
        path = own_root / "HK" / name
        volume = nibabel.load(path)
        assert isinstance(volume, nibabel.Nifti1Image)
        axis = nibabel.aff2axcodes(volume.affine).index("L") if "L" in nibabel.aff2axcodes(volume.affine) else 0
        window = [slice(None)] * 3
        window[axis] = slice(8, 56)
        cropped = volume.slicer[tuple(window)]
        nibabel.save(nibabel.Nifti1Image(cropped.get_fdata(), cropped.affine), path)
    assert run(own_root, job) == 0
    out = capsys.readouterr().out
    assert "warning: HK: a pixel at the job's size is" in out and "33% apart" in out
    assert run(own_root, job, "--set", "method=fedavg") == 0
    assert "a pixel at the job's size" not in capsys.readouterr().out


def test_sites_with_other_pixels_are_a_warning(tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # the two fields of view differ and come onto the same 64 pixels
    small, large = (SCANNERS[name].field_of_view for name in ("ge_3t_endorectal", "siemens_3t_no_coil"))
    assert large > 1.2 * small
    for site, scanner in (("BIDMC", "ge_3t_endorectal"), ("HK", "siemens_3t_no_coil")):
        write_site(tmp_path / "data" / site, scanner)
    assert run(tmp_path / "data", job) == 0
    out = capsys.readouterr().out
    apart = f"{small / 64:.2f} mm (BIDMC) to {large / 64:.2f} mm (HK), {large / small - 1:.0%} apart"
    assert f"warning: between sites: a pixel at the job's size is {apart}" in out
    assert "warning: HK: a pixel" not in out


def test_few_cases_send_no_amplitude(sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sites_root, job, "--site", "HK", "--set", "amplitude.minimum_cases=2") == 0
    assert "warning: site: training patients: 1, amplitude.minimum_cases is 2" in capsys.readouterr().out


def test_a_site_without_amplitude_stops_nobody_while_enough_send_theirs(
    sites_root: Path, tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sites_root / "HK", tmp_path / "data" / "HK")  # 3 patients: 1 for training
    write_site(tmp_path / "data" / "BIDMC", cases=7)  # 5 for training
    few = ["--set", "amplitude.minimum_cases=2", "--set"]
    assert run(tmp_path / "data", job, *few, "amplitude.minimum_sites=1") == 0
    out = capsys.readouterr().out
    assert "so this site sends no amplitude and trains with the global one of the others" in out
    assert "notice: HK: 1 of 2 sites send an amplitude, amplitude.minimum_sites is 1: who sends none trains with" in out
    assert run(tmp_path / "data", job, *few, "amplitude.minimum_sites=2") == 1
    assert "error: HK: 1 of 2 sites send an amplitude, amplitude.minimum_sites is 2: the job" in capsys.readouterr().out
    # the job asks for one patient, but a hospital's own limit is five unless it says otherwise
    assert run(tmp_path / "data", job) == 0
    assert (
        "warning: HK: 2 of 2 sites send an amplitude, amplitude.minimum_sites is 2; outside" in capsys.readouterr().out
    )


def test_a_job_that_would_get_too_few_amplitudes_is_an_error(
    sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sites_root, job, "--set", "amplitude.minimum_cases=2") == 1
    out = capsys.readouterr().out
    assert "0 of 2 sites send an amplitude, amplitude.minimum_sites is 2: the job fails" in out
    assert run(sites_root, job, "--set", "amplitude.minimum_cases=2", "--set", "amplitude.region=off") == 0


def test_a_split_by_slices_is_reported_as_such(sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(sites_root, job, "--site", "HK", "--set", "data.split=as_published") == 0
    out = capsys.readouterr().out
    assert "by slices" in out and "slices of one patient are in training and test" in out
    assert "which would have been empty" not in out


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--site", "Atlantis"], "BIDMC, HK"),
        (["--set", "data.heigth=64"], "did you mean 'data.height'?"),
    ],
)
def test_a_mistake_in_the_command_ends_with_2(
    sites_root: Path, job: Path, more: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(sites_root, job, *more) == 2
    shown = capsys.readouterr()
    assert part in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_a_missing_root_ends_with_2(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Path("nowhere"), job) == 2
    assert capsys.readouterr().err == (
        "harmofl check: nowhere is not a folder; name the folder of the sites' folders, or one site's own\n"
    )


def test_a_broken_experiment_ends_with_2(sites_root: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "app/config/experiment.json").write_text('{"name": }')
    assert run(sites_root, job) == 2
    assert "experiment.json: line 1 column 10" in capsys.readouterr().err


def test_the_data_folder_is_left_as_it_is(own_root: Path, job: Path) -> None:
    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(own_root.rglob("*")) if path.is_file()}

    before = content()
    assert run(own_root, job) == 0
    assert content() == before


def test_loose_cases_beside_a_sites_folder_are_an_error(
    own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (own_root / "HK").iterdir():
        path.rename(own_root / path.name)
    (own_root / "HK").rmdir()
    assert run(own_root, job) == 1
    assert f"error: HK would read {own_root}, where the data of BIDMC lies" in capsys.readouterr().out


def test_a_kit_lets_check_read_as_its_site_does(
    own_root: Path, job: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_privacy(site, folder="bidmc", patient_pattern="^Case", minimum_cases=1)
    assert run(own_root, job, "--kit", str(site)) == 1
    out = capsys.readouterr().out
    assert f"site HK: {own_root / 'BIDMC'}" in out and "1 patient cannot be training, validation and test" in out
    set_privacy(site, patient_pattern="((a)+)+")
    assert run(own_root, job, "--kit", str(site)) == 2
    assert "--kit" in (said := capsys.readouterr().err) and "patient_pattern: repeats a group" in said


def test_check_shows_the_split_that_stays_at_the_site(
    own_root: Path, job: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def parts() -> dict[str, str]:
        run(own_root, job, "--kit", str(site))
        rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Case")]
        return {row[0]: row[-1] for row in rows}

    set_privacy(site, minimum_cases=1)
    dealt = parts()
    # what an earlier job with another seed has left: every part has gone to the next case
    kept = dict(zip(dealt, [*list(dealt.values())[1:], next(iter(dealt.values()))], strict=True))
    with open_ledger(site / "harmofl") as ledger:
        held = {ledger.hash_of("prostate", "split", case): part for case, part in kept.items()}
        split = KeptSplit(settings={}, parts=held, whole=None, run="run1", since="2026-11-30 12:00:00")
        ledger.content = ledger.content.model_copy(update={"splits": {"prostate": split}})
    assert len(dealt) == 3 and kept != dealt
    assert parts() == kept


def test_a_file_name_does_not_command_the_terminal(
    own_root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = own_root / "HK" / "Case00.nii.gz"
    image.rename(image.with_name("Case00\x1b[2J\u202e.nii.gz"))
    run(own_root, job, "--site", "HK")
    shown = capsys.readouterr()
    assert "Case00?[2J?" in shown.out
    assert all(line.isprintable() for line in (shown.out + shown.err).splitlines())
    assert main(["check", f"{own_root}\x1b[31m\nx", "--job", str(job)]) != 0
    shown = capsys.readouterr()
    assert "?[31m" in shown.out + shown.err and "\x1b" not in shown.out + shown.err
