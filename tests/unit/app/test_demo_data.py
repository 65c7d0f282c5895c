"""harmofl demo-data on small settings of all three jobs: what it writes, says and refuses, and the page."""

import base64
import io
import logging
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harmofl.app import costs
from harmofl.app.cli import main
from harmofl.app.gallery import collect_gallery
from harmofl.app.job import read_job
from harmofl.core.radial import site_gain
from harmofl.flare.participant import Participant
from harmofl.flare.site import SiteConfig
from tests.small_job import JOB, SITES

JOBS = JOB.parent
FIRST_SITE = {
    "harmofl_prostate": "ge_3t_endorectal: endorectal coil, field of view 144 mm, blur 0.7 mm, noise 1.2",
    "harmofl_camelyon17": "purple_gray: optical density of hematoxylin 0.8, of eosin 0.34, blur 0.3 µm, noise 2 gray",
    "harmofl_nuclei": "lung: optical density of hematoxylin 1, of eosin 0.8, blur 0.25 µm, noise 2.5 gray levels",
}
SMALL = {
    "harmofl_prostate": ["demo.data.cases=3", "demo.data.matrix=64", "demo.data.slices=3"],
    "harmofl_camelyon17": ["demo.data.slides=3", "demo.data.patches=12"],
    "harmofl_nuclei": ["demo.data.patients=3", "demo.data.images=3", "demo.data.size=64"],
}


def small(job: Path) -> list[str]:
    return [part for key in (*SMALL[job.name], "amplitude.minimum_cases=1") for part in ("--set", key)]


@pytest.fixture(autouse=True)
def _one_step_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LONGEST_MEASUREMENT", 0.0)


@pytest.mark.parametrize("name", SMALL)
def test_every_job_gives_a_data_root_with_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = JOBS / name
    assert main(["demo-data", str(job), "-o", "demo root", *small(job), "--gallery"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    sites = read_job(job, []).sites
    lines = shown.out.splitlines()
    assert len(lines) == len(sites) + 2
    for site, line in zip(sites, lines, strict=False):
        assert line.startswith(f"harmofl demo-data: demo root/{site}: ") and "kept" not in line
    command = shlex.split(lines[-1].partition("as the demo does: ")[2])
    assert command[:2] == ["harmofl", "simulate"] and command[4] == str(Path("demo root").absolute())

    # the folder is read, and the command runs what the demo would: same hash without the demo's overrides
    assert main(["check", "demo root", "--job", command[2], *command[5:]]) == 0
    checked = capsys.readouterr().out
    assert "error" not in checked and "gallery" not in checked
    assignments = [part for part in command[5:] if part != "--set"]
    given = [part for part in small(job) if part != "--set"]
    assert read_job(job, assignments).resolve(demo=False).hash == read_job(job, given).resolve(demo=True).hash

    page = Path("demo root/gallery.html").read_text(encoding="utf-8")
    rows = re.findall(r'<th scope="row"><strong>([^<]*)</strong>', page)
    assert rows == list(sites)
    assert FIRST_SITE[name] in lines[0] and FIRST_SITE[name] in page
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]*)"', page)
    assert len(pictures) == page.count("<img") and len(pictures) % (3 * len(sites)) == 0 and pictures
    for picture in pictures:
        with Image.open(io.BytesIO(base64.b64decode(picture, validate=True))) as opened:
            opened.load()
            assert opened.mode == ("L" if name == "harmofl_prostate" else "RGB")
    assert (">tumor</small>" in page) == (name == "harmofl_camelyon17")
    assert ('vector-effect="non-scaling-stroke"' in page) == (name != "harmofl_camelyon17")


def test_a_command_without_a_place_ends_with_2(job: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo-data", str(job)])
    assert end.value.code == 2


def collected(job: Path, root: Path, *changes: str) -> tuple[Any, Any]:
    read = read_job(job, changes)
    experiment = read.resolve(demo=True)
    return experiment, collect_gallery(root, read.sites, experiment, root.parent / "cache")


def test_images_go_through_the_steps_of_a_run(job: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert main(["demo-data", str(job), "-o", str(root)]) == 0
    experiment, gallery = collected(job, root)
    profiles = {}
    for site in SITES:
        config = SiteConfig(site, True, data_root=root, state_root=tmp_path / site, device="cpu", minimum_cases=1)
        update = Participant(experiment, config, "run", lambda: False, logging.getLogger(site)).estimate_amplitude()
        assert update.amplitude is not None
        profiles[site] = update.amplitude.values.astype(np.float64)
    target = torch.from_numpy(np.mean(list(profiles.values()), axis=0))
    for row in gallery.sites:
        gain = site_gain(target, torch.from_numpy(profiles[row.name]), 64, 64).double().numpy()
        for example in row.examples:
            image = example.images[0].astype(np.float64)
            centered = image - image.mean((-2, -1), keepdims=True)
            standardized = centered / centered.std((-2, -1), keepdims=True)
            expected = np.fft.irfft2(np.fft.rfft2(standardized) * gain, s=(64, 64))
            np.testing.assert_allclose(example.images[1], standardized, atol=1e-4)
            np.testing.assert_allclose(example.images[2], expected, atol=1e-3)
        # the profile after the intensity step is what the site would send, averaged over channels
        np.testing.assert_allclose(row.profiles[1], profiles[row.name].mean(0), atol=1e-5)


def test_steps_follow_the_settings(job: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert main(["demo-data", str(job), "-o", str(root)]) == 0
    titles = {}
    for change in ("method=fedavg", "amplitude.preset=as_published", "amplitude.preset=as_described"):
        _, gallery = collected(job, root, change)
        titles[change] = [step.title for step in gallery.steps]
        assert all(len(row.profiles) == len(gallery.steps) == len(row.examples[0].images) for row in gallery.sites)
    assert titles["method=fedavg"] == ["as read", "after the intensity step"]
    assert titles["amplitude.preset=as_published"] == ["as read", "after the amplitude step"]
    # the whole amplitude is replaced: every image of every site then has that of the others
    first, second = gallery.sites
    np.testing.assert_allclose(first.profiles[1], second.profiles[1], atol=1e-3)
    assert np.abs(first.profiles[0] - second.profiles[0]).max() > 0.05


def test_a_task_of_the_jobs_own_has_a_page(job: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "jobs" / "outside" / "disks.py", job / "app" / "custom")
    changes = ("task=disks.DiskTask", "reader={}", 'demo.data={"cases": 4}')
    sets = [part for change in changes for part in ("--set", change)]
    assert main(["demo-data", str(job), "-o", "root", "--gallery", *sets]) == 2, "its code was not allowed"
    assert main(["demo-data", str(job), "-o", "root", "--gallery", "--allow-code", *sets]) == 0
    assert Path("root/gallery.html").read_text(encoding="utf-8").count("bright disks on noise") == len(SITES)


def test_a_complete_folder_is_kept_and_said_so(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-data", str(job), "-o", "root"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")}
    capsys.readouterr()
    assert main(["demo-data", str(job), "-o", "root"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")} == before
    assert "root/HK: kept, delete it for other settings: 6 files" in capsys.readouterr().out
    assert sorted(path.name for path in Path("root").iterdir()) == sorted(SITES)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (
            ["--set", 'demo.data.scanners={"BIDMC": "magnet"}'],
            "demo.data.scanners.BIDMC: 'magnet' is none of ge_3t_endorectal",
        ),
        (["--set", "demo.data.case=2"], "did you mean 'demo.data.cases'?"),
        (["--set", "demo=null"], "no demo settings"),
        (["--set", "amplitude.minimum_cases=9", "--gallery"], "0 of 2 sites send an amplitude"),
    ],
)
def test_a_mistake_in_the_settings_ends_with_2(
    job: Path, more: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo-data", str(job), "-o", "root", *more]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("harmofl demo-data: ") and part in shown.err and shown.err.count("\n") == 1


def test_other_files_are_never_touched(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Path("root/HK/Case00.nii.gz")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"a patient")
    assert main(["demo-data", str(job), "-o", "root"]) == 2
    assert capsys.readouterr().err == (
        "harmofl demo-data: root/HK already holds other files; delete it to write synthetic cases there\n"
    )
    assert [path for path in Path("root/HK").iterdir()] == [kept] and kept.read_bytes() == b"a patient"


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_a_place_that_cannot_be_written_ends_with_2(job: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert main(["demo-data", str(job), "-o", output]) == 2
    shown = capsys.readouterr().err
    assert f"{output}/BIDMC: cannot be written (Not a directory); name another folder with -o" in shown


def test_kept_data_that_cannot_be_read_ends_with_1(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo-data", str(job), "-o", "root"]) == 0
    for path in Path("root/HK").iterdir():
        path.write_bytes(b"")
    capsys.readouterr()
    assert main(["demo-data", str(job), "-o", "root", "--gallery"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "harmofl demo-data: failed: site HK has no image to train on; run harmofl check root"
    assert not Path("root/gallery.html").exists()
