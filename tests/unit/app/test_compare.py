"""The grid of a comparison, and a small one run to its end, stopped, resumed and failing in part."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harmofl.app.cli import main
from harmofl.app.comparison_folder import hold_folder
from harmofl.app.grid import Grid, finished_record, run_cells
from harmofl.app.grid_plan import Request, plan_grid, read_sweep
from harmofl.app.job import JobError, read_job
from harmofl.evidence.comparison import read_cell, read_comparison
from harmofl.experiment import ExperimentError
from harmofl.tasks import resolve_experiment
from tests.small_job import JOB, SITES, write_site, write_small_job


def planned(job_folder: Path, output: Path, assignments: Sequence[str] = (), **changed: Any) -> Grid:
    request = Request(
        job=job_folder,
        assignments=assignments,
        methods=["fedavg", "harmofl"],
        seeds=[0, 1],
        sweeps=[],
        leave_one_site_out=False,
        data=None,
        demo=True,
        output=output,
        processes=None,
        landscape=True,
        images=False,
    )
    request = replace(request, **changed)
    job = read_job(job_folder, assignments)
    return plan_grid(job, resolve_experiment(job.settings, demo=True), request, {}, output)


def test_every_method_and_seed_is_a_cell_of_its_own(tmp_path: Path) -> None:
    grid = planned(JOB, tmp_path)
    assert [(use.method, use.seed) for use in grid.uses] == [
        ("fedavg", 0), ("harmofl", 0), ("fedavg", 1), ("harmofl", 1)
    ]  # fmt: skip
    assert len({use.cell for use in grid.uses}) == len(grid.cells) == 4
    assert len({cell.plan.key.experiment_hash for cell in grid.cells}) == 4
    assert [cell.plan.landscape for cell in grid.cells] == [True, True, False, False], "of the first seed only"
    assert not any(cell.plan.landscape for cell in planned(JOB, tmp_path, landscape=False).cells)


def test_cells_that_would_be_equal_run_once(tmp_path: Path) -> None:
    """FedAvg sets alpha itself, and the job's own value is in the base setting: neither is run again."""
    grid = planned(JOB, tmp_path, seeds=[0], sweeps=["perturbation.alpha=0,0.05,0.5"])
    assert len(grid.uses) == 2 * 4 and len(grid.cells) == 1 + 3
    assert grid.fixed == {"perturbation.alpha": ("fedavg",)}
    by_value = {use.value: use.cell for use in grid.uses if use.method == "harmofl"}
    assert by_value[0.05] == by_value[None] != by_value[0.5]


ISSUE = ["--methods", "fedavg", "fedprox", "fednova", "fedadam", "fedbn", "harmofl", "--seeds", "0", "1", "2"]


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty present folder without a data root, where every cell of a comparison ends unfinished at once."""
    monkeypatch.setattr("harmofl.app.compare.run_cells", lambda cells, *_: {cell.name: "not run" for cell in cells})
    monkeypatch.delenv("HARMOFL_DATA_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_needs_neither_output_nor_data(unrun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(JOB), *ISSUE, "--processes", "2"]
    assert main(command) == 1
    # six methods and FedBN's control, three seeds each
    said = capsys.readouterr().out.splitlines()[0]
    assert said == f"harmofl compare: 21 cells, 2 at a time, demo data, results in {unrun / 'comparison'}"
    assert main(command) == 1, "the folder is resumed"


def test_the_folder_of_another_job_is_refused_by_one_line(unrun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_small_job(unrun / "job", {"name": "another_job"})
    assert main(["compare", str(JOB), *ISSUE]) == 1
    capsys.readouterr()
    assert main(["compare", str(other), "--methods", "fedavg"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "the comparison of job harmofl_prostate, not of another_job" in said


def test_two_commands_do_not_share_a_folder(unrun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(JOB), "--demo", "--methods", "fedavg", "-o", str(unrun / "out")]
    with hold_folder(unrun / "out", "harmofl_prostate"):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "another harmofl compare works in it" in said
    assert main(command) == 1, "free again"


def test_fedbn_gets_plain_averaging_on_its_own_network_beside_it(tmp_path: Path) -> None:
    grid = planned(JOB, tmp_path, methods=["fedavg", "fedbn"])
    control = "fedavg with batch norm"
    assert grid.controls == {"fedbn": control}
    assert [use.method for use in grid.uses] == ["fedavg", "fedbn", control] * 2
    cells = {use.cell: use for use in grid.uses}
    beside = [cell for cell in grid.cells if cells[cell.name].method == control]
    assert [cell.label for cell in beside] == [f"{control} seed 0", f"{control} seed 1"]
    assert not any(cell.plan.landscape for cell in beside)
    fedbn = next(cell for cell in grid.cells if cells[cell.name].method == "fedbn").experiment
    # it differs from fedbn in the layers that stay at a site and in nothing else
    changed = {"method": "fedavg", "federation": fedbn.federation.model_copy(update={"local_layers": "none"})}
    assert beside[0].experiment == fedbn.model_copy(update=changed)


@pytest.mark.parametrize(
    ("methods", "assignments"),
    [(["fedavg", "fedbn"], ["network.norm=batch"]), (["fedavg", "fedprox"], []), (["fedbn", "fedavg"], [])],
)
def test_no_control_where_the_reference_has_the_same_network(
    tmp_path: Path, methods: list[str], assignments: list[str]
) -> None:
    grid = planned(JOB, tmp_path, assignments, methods=methods, seeds=[0])
    assert grid.controls == {} and len(grid.cells) == 2


def test_sweeps_are_not_multiplied(tmp_path: Path) -> None:
    sweeps = ["perturbation.alpha=0,0.5", "training.local_epochs=1,5"]
    grid = planned(JOB, tmp_path, methods=["harmofl"], seeds=[0], sweeps=sweeps)
    assert len(grid.cells) == 1 + 2 + 2


def test_leaving_a_site_out_lowers_what_is_needed_and_not_more(tmp_path: Path) -> None:
    grid = planned(JOB, tmp_path, methods=["harmofl"], seeds=[0], leave_one_site_out=True)
    assert [cell.plan.key.left_out for cell in grid.cells] == [None, "BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"]
    assert len({cell.name for cell in grid.cells}) == 7
    assert grid.cells[1].plan.overrides["federation.minimum_sites"] == 5
    assert "federation.minimum_sites" not in grid.cells[0].plan.overrides
    few = planned(JOB, tmp_path, ["federation.minimum_sites=2"], methods=["harmofl"], leave_one_site_out=True)
    assert few.cells[1].plan.overrides["federation.minimum_sites"] == 2


def test_a_method_whose_sites_keep_layers_is_not_scored_where_none_of_them_was_trained(tmp_path: Path) -> None:
    grid = planned(JOB, tmp_path, methods=["fedavg", "fedbn", "local_only"], leave_one_site_out=True)
    assert {use.method for use in grid.uses if use.left_out} == {"fedavg"}
    control = grid.controls["fedbn"]
    assert {use.method for use in grid.uses if not use.left_out} == {"fedavg", "fedbn", control, "local_only"}
    assert list(grid.not_left_out) == ["fedbn", "local_only"]
    assert "each site keeps a model of its own" in grid.not_left_out["local_only"]
    # batch_stats layers hold nothing that could stay: there FedBN is plain averaging
    grid = planned(JOB, tmp_path, ["network.norm=batch_stats"], methods=["fedbn"], leave_one_site_out=True)
    assert {use.left_out for use in grid.uses} == {None, "BIDMC", "BMC", "HK", "I2CVB", "RUNMC", "UCL"}
    with pytest.raises(JobError, match="method fedbn .* leaves no model for other hospitals"):
        planned(JOB, tmp_path, methods=["fedbn", "local_only"], leave_one_site_out=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"methods": ["fedavg", "fedavgg"]}, "did you mean 'fedavg'"),
        ({"sweeps": ["perturbation.alpha=0,-1"]}, "perturbation.alpha"),
        ({"sweeps": ["perturbation.alfa=0,1"]}, "did you mean 'perturbation.alpha'"),
    ],
)
def test_a_mistake_in_any_cell_is_found_before_one_runs(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ExperimentError, match=said):
        planned(JOB, tmp_path, **changed)


@pytest.mark.parametrize(
    "text",
    ["alpha", "=0,1", "perturbation.alpha=0", "perturbation.alpha=", "seed=0,1", "a.b=1,1.0", "a.b=[1,2],[1,2]"]
    + ["a.b=" + "[" * 100_000],
)
def test_a_sweep_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="--sweep"):
        read_sweep(text)


def test_values_of_a_sweep_are_json_where_they_can_be() -> None:
    assert read_sweep("amplitude.region=off,dc").values == ("off", "dc")
    assert read_sweep("training.local_epochs=1,3").values == (1, 3)
    assert read_sweep("data.fractions=[0.6,0.2,0.2],[0.8,0.1,0.1]").values == ([0.6, 0.2, 0.2], [0.8, 0.1, 0.1])
    assert read_sweep("training.clip_norm=null,1.0").values == (None, 1.0)
    assert read_sweep("training.local_epochs=1,3,1.0,3").values == (1, 3)


def test_a_sweep_that_changes_no_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--sweep perturbation\.alpha: every method that is compared sets it itself"):
        planned(JOB, tmp_path, methods=["fedavg", "amplitude_only"], sweeps=["perturbation.alpha=0,0.5"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "method=fedavg"], "--set method: use --methods"),
        (["--set", "seed=3"], "--set seed: use --seeds"),
        (["--set", "perturbation.alpha=1"], "every method that is compared sets it itself"),
        (["--leave-one-site-out"], "needs at least three sites"),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    job = write_small_job(tmp_path / "job")
    command = ["compare", str(job), "--demo", "--methods", "fedavg", "-o", str(tmp_path / "out"), *arguments]
    assert main(command) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_small_job(tmp_path / "job")
    (tmp_path / "thesis.txt").write_text("mine")
    command = ["compare", str(job), "--demo", "--methods", "fedavg", "-o", str(tmp_path)]
    assert main(command) == 2
    assert "holds something else" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_comparison_goes_on_and_a_failing_cell_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = write_small_job(tmp_path / "job"), tmp_path / "out"
    # 1e39 is beyond float32, so that the first step leaves weights that are not finite
    grid = planned(job, out, methods=["fedavg"], seeds=[0], sweeps=["training.learning_rate=0.001,1e39"])

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cells(grid.cells[:2], 1, stop)  # as Ctrl-C while the second one waits
    assert multiprocessing.active_children() == []
    first, second = (cell.plan for cell in grid.cells[:2])
    record = finished_record(first)
    assert record is not None and finished_record(second) is None
    assert record.seen == list(SITES) and len(record.drift) == 1 and record.landscape is not None
    written = (first.folder / "cell.json").stat().st_mtime_ns

    command = ["compare", str(job), "--demo", "--methods", "fedavg", "--seeds", "0", "-o", str(out)]
    command += ["--sweep", "training.learning_rate=0.001,1e39", "--no-images"]
    assert main(command) == 1
    said = capsys.readouterr().out.splitlines()
    assert "3 cells, 1 of them finished before" in said[0]
    assert said[-1].startswith("harmofl compare: failed: 1 of 3 cells: fedavg seed 0, training.learning_rate=1e+39")
    assert "lower training.learning_rate" in next(line for line in said if ": failed: " in line)
    assert (first.folder / "cell.json").stat().st_mtime_ns == written
    told = read_comparison(out / "comparison.json")
    assert list(told.failed) == ["fedavg seed 0, training.learning_rate=1e+39"] and len(told.uses) == 2
    assert "failed" in (out / "comparison.html").read_text()
    assert not list(out.glob("cells/*/sites")), "what sites kept for the run is gone"
    assert not (out / "shared_data").exists(), "so is what the runs shared"
    spent = next(line for line in said if " of all processes went to other things than training and scoring" in line)
    assert f"compare: {told.share_beside:.1%} of " in spent
    assert {"start", "reading", "training", "scoring", "report", "page", "planning", "landscape"} <= told.spent.keys()
    beside = sum(seconds for part, seconds in told.spent.items() if part not in ("training", "scoring"))
    assert told.share_beside == pytest.approx(beside / sum(told.spent.values()))
    assert finished_record(replace(first, key=first.key.model_copy(update={"version": "0.0.9"}))) is None


@pytest.mark.slow
def test_a_cell_scores_the_site_that_was_left_out(tmp_path: Path) -> None:
    grid = planned(JOB, tmp_path, ["federation.rounds=1", "training.local_epochs=1", "network.width=2"],
                   methods=["harmofl"], seeds=[0], leave_one_site_out=True, landscape=False)  # fmt: skip
    cell = next(cell for cell in grid.cells if cell.plan.key.left_out == "HK")
    assert run_cells([cell], 1, lambda line: None) == {}
    record = read_cell(cell.plan.folder / "cell.json")
    assert "HK" not in record.seen and len(record.seen) == 5
    assert record.scores["HK"].best["dice"].n + record.scores["HK"].best["dice"].undefined == 4


@pytest.mark.slow
def test_a_comparison_of_files_runs_again_when_one_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, data = write_small_job(tmp_path / "job"), tmp_path / "data"
    for site in SITES:
        write_site(data / site)
    command = ["compare", str(job), "--data", str(data), "--methods", "fedavg", "--seeds", "0"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    told = read_comparison(tmp_path / "out" / "comparison.json")
    assert not told.demo and told.methods[0].method == "fedavg"
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "images of patients" in page and "siemens_3t_surface" not in page
    assert main([*command, "-o", str(data / "out")]) == 2, "nothing is written into the data"
    (data / "HK" / "Case99.nii.gz").write_bytes((data / "HK" / "Case00.nii.gz").read_bytes())
    capsys.readouterr()
    main([*command, "-o", str(tmp_path / "out"), "--no-images"])
    assert "finished before" not in capsys.readouterr().out
