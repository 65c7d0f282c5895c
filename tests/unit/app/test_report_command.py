"""`harmofl report`: which folders it takes, what it adds where the data lies, and that it changes no result."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harmofl.app.cli import main
from harmofl.app.examples import collect_examples
from harmofl.evidence.results import Results
from harmofl.flare.privacy_ledger import KeptSplit, open_ledger
from harmofl.flare.server_run import BEST_MODEL
from harmofl.tasks import SiteData
from harmofl.tasks.prostate import ProstateTask
from tests.small_job import SITES
from tests.unit.app.finished_run import write_run
from tests.unit.app.provisioned import set_privacy

FOLDERS = ("", "run", "app_server", "workspace/app_server", "server/simulate_job/app_server")
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(job: Path, tmp_path: Path) -> MakeRun:
    """A finished run of the small job with an untrained best model, in a folder of the given form."""

    def make(form: str = "", *, demo: bool = False, name: str = "run", **changes: Any) -> Path:
        return write_run(tmp_path / name / form, job, demo=demo, **changes)

    return make


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake in the command ends with."""
    assert main(["report", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("harmofl report: ")
    return shown.err


@pytest.mark.parametrize("form", FOLDERS)
def test_a_run_is_found_in_every_form_and_not_changed(
    make_run: MakeRun, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(form)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["report", str(tmp_path / "run")]) == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(after) - set(before) == {"report.html"} and before.items() <= after.items()
    assert capsys.readouterr().out == f"harmofl report: report: {folder / 'report.html'}\n"


def test_the_page_goes_where_it_is_asked_to(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    folder = make_run()
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file() and not (folder / "report.html").exists()
    capsys.readouterr()
    assert "cannot be written" in refusal(capsys, str(folder), "-o", str(tmp_path / "missing" / "page.html"))
    assert "name a page" in refusal(capsys, str(folder), "-o", str(folder / "results.json"))


def test_a_run_that_is_not_one_is_one_line(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    assert "is not a folder" in refusal(capsys, str(tmp_path / "nowhere"))
    assert "holds no results.json; did the run finish?" in refusal(capsys, str(tmp_path))
    (tmp_path / "failure.txt").write_text("round 1: 1 of 2 sites accepted\n")
    assert "failed before it had results: round 1: 1 of 2 sites accepted" in refusal(capsys, str(tmp_path))
    folder = make_run()
    (folder / "round_metrics.jsonl").unlink()
    assert "round_metrics.jsonl: cannot be read" in refusal(capsys, str(folder))


def test_results_of_another_version_are_one_line(make_run: MakeRun, capsys: Any) -> None:
    assert "is of format 0, this harmofl reads 2" in refusal(capsys, str(make_run(name="old", format=0)))
    folder = make_run()
    held = json.loads((folder / "results.json").read_text())
    del held["privacy"]
    (folder / "results.json").write_text(json.dumps(held))
    assert "results.json: privacy: Field required" in refusal(capsys, str(folder))


def test_the_reason_of_a_failed_run_is_on_its_page(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "failure.txt").write_text("evaluation: 1 sites answered,\n2 are needed\n")
    assert main(["report", str(folder)]) == 0
    assert "The run failed: evaluation: 1 sites answered, 2 are needed." in (folder / "report.html").read_text()


def test_a_comparison_with_local_only(make_run: MakeRun, capsys: Any) -> None:
    run, local = make_run(), make_run(name="local", method="local_only")
    assert main(["report", str(run), "--local-only", str(local)]) == 0
    assert "higher at 0 of them" in (run / "report.html").read_text()
    capsys.readouterr()
    assert "method is harmofl, not local_only" in refusal(capsys, str(run), "--local-only", str(run))
    assert "is not a folder" in refusal(capsys, str(run), "--local-only", str(run / "none"))


def test_pictures_of_the_sites_that_are_here_without_any_name(make_run: MakeRun, sites_root: Path, capsys: Any) -> None:
    folder = make_run()
    assert main(["report", str(folder), "--data", str(sites_root)]) == 0
    page = (folder / "report.html").read_text()
    assert page.count('<img src="data:image/png') == len(SITES)  # three cases: one is tested
    assert page.count('class="reference"') == len(SITES)
    assert "Case0" not in page and str(sites_root) not in page
    assert "keep it where they may be seen" in capsys.readouterr().out


def test_other_scores_than_the_runs_are_said_on_the_page(make_run: MakeRun, sites_root: Path, tmp_path: Path) -> None:
    folder = make_run()
    results = Results.model_validate_json((folder / "results.json").read_text())
    shown = collect_examples(folder, results, sites_root, tmp_path / "place")
    assert [site.note[:8] for site in shown.sites] == ["Careful:"] * 2  # the run is made up: 0.5 everywhere
    for site in shown.sites:  # the scores that this model has there
        results.sites[site.site].test["dice"].per_case = [picture.score for _, picture in site.pictures]
    again = collect_examples(folder, results, sites_root, tmp_path / "again")
    assert [site.note for site in again.sites] == ["", ""]


def test_pictures_are_of_the_test_cases_by_the_sites_own_pattern(
    make_run: MakeRun, sites_root: Path, site: Path, capsys: Any
) -> None:
    folder = make_run()
    set_privacy(site)
    assert main(["report", str(folder), "--data", str(sites_root), "--kit", str(site)]) == 0
    page = (folder / "report.html").read_text()
    assert page.count('<img src="data:image/png') == 1 and "<h3>HK</h3>" in page and "<h3>BIDMC</h3>" not in page
    # by hand: where all three cases are of one patient, all train and none is tested
    set_privacy(site, patient_pattern="^Case")
    assert main(["report", str(folder), "--data", str(sites_root), "--kit", str(site)]) == 0
    page = (folder / "report.html").read_text()
    assert "<img src" not in page and "<h3>HK</h3>" in page
    # by hand: where an earlier job has left all three to training, none is tested
    set_privacy(site)
    with open_ledger(site / "harmofl") as ledger:
        parts = {ledger.hash_of("prostate", "split", f"Case0{number}"): "train" for number in range(3)}
        split = KeptSplit(settings={}, parts=parts, whole=None, run="run1", since="2026-11-30 12:00:00")
        ledger.content = ledger.content.model_copy(update={"splits": {"prostate": split}})
    assert main(["report", str(folder), "--data", str(sites_root), "--kit", str(site)]) == 0
    page = (folder / "report.html").read_text()
    assert "<img src" not in page and "<h3>HK</h3>" in page
    capsys.readouterr()
    assert "--kit: is that of the site whose data lies in" in refusal(capsys, str(folder), "--kit", str(site))


def test_a_sites_own_folder_needs_its_name(make_run: MakeRun, sites_root: Path, capsys: Any) -> None:
    folder, own = make_run(), sites_root / "HK"
    assert main(["report", str(folder), "--data", str(own)]) == 1
    assert "say whose with --site" in capsys.readouterr().out
    assert main(["report", str(folder), "--data", str(own), "--site", "HK"]) == 0
    page = (folder / "report.html").read_text()
    assert "<h3>HK</h3>" in page and "<h3>BIDMC</h3>" not in page
    capsys.readouterr()
    assert "the run's sites are BIDMC, HK" in refusal(capsys, str(folder), "--data", str(own), "--site", "UCL")
    assert "--site: says whose data lies" in refusal(capsys, str(folder), "--site", "HK")


def test_a_folder_without_any_site_fails(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["report", str(make_run()), "--data", str(tmp_path / "empty")]) == 1
    assert "failed: no data for site" in capsys.readouterr().out


@pytest.mark.parametrize("left", ["damaged", "empty", "none to train on"])
def test_a_site_without_a_usable_case_is_named_and_left_out(
    make_run: MakeRun, sites_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, left: str
) -> None:
    folder = make_run()
    root = Path(shutil.copytree(sites_root, folder.parent / "root"))
    for path in (root / "HK").glob("*.nii.gz") if left != "none to train on" else ():
        path.unlink() if left == "empty" else path.write_bytes(b"damaged")
    if left == "none to train on":  # without a training case a site has no profile
        opened = ProstateTask.open_site

        def untrained(self: ProstateTask, place: Path, site: str, *more: Any) -> SiteData:
            data = opened(self, place, site, *more)
            return dataclasses.replace(data, training=[]) if site == "HK" else data

        monkeypatch.setattr(ProstateTask, "open_site", untrained)
    assert main(["report", str(folder), "--data", str(root)]) == 1
    told = capsys.readouterr()
    assert told.err == "" and told.out.count(f"no pictures of site HK: {root / 'HK'} holds no ") == 1
    page = (folder / "report.html").read_text()
    assert page.count('<img src="data:image/png') == 1 and "<h3>HK</h3>" in page
    assert "No pictures: the data that lies here cannot be used." in page and str(root) not in page


def test_the_demo_is_drawn_from_data_made_again(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    folder = make_run(demo=True)
    assert main(["report", str(folder), "--demo"]) == 0
    page = (folder / "report.html").read_text()
    assert "which was made again for this page" in page and page.count('<img src="data:image/png') == len(SITES)
    assert "patients" not in capsys.readouterr().out
    assert "trained on real data" in refusal(capsys, str(make_run(name="real")), "--demo")


def test_a_model_of_another_run_and_models_that_are_no_one_model_are_refused(
    make_run: MakeRun, sites_root: Path, capsys: Any
) -> None:
    folder = make_run()
    other = make_run(name="other", model_sha256={BEST_MODEL: "0" * 64})
    assert "is not the file that results.json names" in refusal(capsys, str(other), "--data", str(sites_root))
    held = json.loads((folder / "results.json").read_text())
    for kept, layers in (("norm", "its own norm layers"), ("all", "a model of its own")):
        held["experiment"]["federation"]["local_layers"] = kept
        held["experiment"]["network"]["norm"] = "batch"
        held["experiment"]["amplitude"]["region"] = "off"
        (folder / "results.json").write_text(json.dumps(held))
        assert f"each site keeps {layers}" in refusal(capsys, str(folder), "--data", str(sites_root))
    (other / BEST_MODEL).unlink()
    assert "no such checkpoint" in refusal(capsys, str(other), "--data", str(sites_root))


def test_a_folder_with_several_runs_is_refused_by_name(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("", "app_server"):
        make_run(form)
    folder = tmp_path / "run"
    assert f"{folder}: holds several runs: {folder}, {folder / 'app_server'}; name one" in refusal(capsys, str(folder))
