"""`harmofl plan`: the arithmetic of a round, the parts that are really measured, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from harmofl.app import costs
from harmofl.app.cli import main
from harmofl.app.costs import Pace
from harmofl.app.forecast import MODELS_AT_SERVER, Parts, _with_disk, forecast, parts_here
from harmofl.app.plan import Request, _advice, _held, _minimums, _precision, experiment_of, rate_of
from harmofl.app.processor_time import Spent
from harmofl.app.site_process import Start
from tests.small_job import JOB

PARTS = Parts(
    listens=0.5,
    pace=Pace(training=0.5, prediction=0.1, how="by hand", first=1.0, share=0.25),
    simulated_pace=Pace(training=0.75, prediction=0.2, how="by hand", first=0.5, share=0.5),
    start=5.0,
    task=2.0,
    pack_task=0.25,
    unpack_task=0.5,
    pack_answer=0.75,
    unpack_answer=0.25,
    add=0.75,
    close=3.0,
    down=1000,
    up=500,
    model=900,
    process=10_000,
    server_process=20_000,
    training=5000,
)


def of_sites(sites: int, server_rate: float, site_rate: float, *more: str, epochs: int = 2):  # type: ignore[no-untyped-def]
    experiment = experiment_of("unet", [f"training.local_epochs={epochs}", *more])
    rates = {"server_rate": server_rate, "site_rate": site_rate}
    return forecast(PARTS, experiment, sites=sites, images=100, validation=20, **rates)


def test_a_round_by_hand() -> None:
    # the server's line passes 100 bytes a second: 10 sites x 1000 bytes down, and up 10 x 500 at 5 s each, while an
    # answer is taken in 0.25 + 0.75 s
    predicted = of_sites(10, server_rate=100.0, site_rate=1000.0)
    assert predicted.down == 100 and predicted.up == 50
    assert predicted.training == 2 * 100 * 0.5 + 20 * 0.1
    assert predicted.site == 0.5 + 2.0 + 0.75 and predicted.server == 3.0 + 0.25
    assert predicted.seconds == pytest.approx(100 + 102 + 3.25 + 50 + 3.25)
    # FLARE's simulator waits 1.7 s for a process and 1 s until it looks again whether it listens, which it has done
    # after 0.5 of the 5 s that it takes to start; its first step takes 0.5 s more
    assert predicted.process == pytest.approx(1.7 + 1 + 4.5 + 0.5)
    # one after the other without a line: each site starts, trains, does the rest, and its answer is taken; 2.7 of the
    # 3.25 s at the server pass while the first site's process starts
    assert predicted.simulated == pytest.approx(10 * (7.7 + (2 * 100 * 0.75 + 20 * 0.2) + 3.25 + 1.0) + 0.55)
    assert (predicted.site_memory, predicted.server_memory) == (15_000, 20_000 + MODELS_AT_SERVER * 900)


def test_a_busy_machine_lengthens_all_but_the_waits() -> None:
    experiment = experiment_of("unet", ["training.local_epochs=2"])
    line = {"server_rate": float("inf"), "site_rate": float("inf")}
    busy = forecast(PARTS.as_busy, experiment, sites=10, images=100, validation=20, **line)
    # one thread gets half a core, the threads of a site's training a quarter of a core each
    assert busy.training == 4 * (2 * 100 * 0.5 + 20 * 0.1)
    assert busy.site == 2 * 3.25 and busy.server == 2 * 3.25 and busy.up == 10 * 2 * 1.0
    # the process listens after 1 s, when it is looked for again; then 9 s of imports and 1 s more for the first step
    assert busy.process == pytest.approx(1.7 + 1 + 9 + 1)
    assert busy.simulated == pytest.approx(10 * (12.7 + 2 * 154 + 6.5 + 2.0) + (6.5 - 2.7))
    assert PARTS.as_busy.down == PARTS.down and PARTS.as_busy.process == PARTS.process, "bytes are no seconds"


@pytest.mark.parametrize(("listens", "looked"), [(0.2, 1), (1.0, 1), (1.2, 2), (3.5, 4)])
def test_the_simulator_looks_once_a_second_whether_a_process_listens(listens: float, looked: int) -> None:
    experiment = experiment_of("unet", [])
    parts = replace(PARTS, listens=listens)
    line = {"server_rate": float("inf"), "site_rate": float("inf")}
    predicted = forecast(parts, experiment, sites=2, images=100, validation=20, **line)
    assert predicted.process == pytest.approx(1.7 + looked + (5 - listens) + 0.5)


def test_a_wait_for_the_disk_is_what_neither_the_work_nor_other_programs_explain() -> None:
    # 2 s of work with half a core last 4 s; the wall says 5
    assert _with_disk(Spent(wall=5, process=2, thread=2), share=0.5) == 2 + 1
    assert _with_disk(Spent(wall=3.9, process=2, thread=2), share=0.5) == 2


def test_the_slower_line_counts_and_then_the_server_itself() -> None:
    slow_site = of_sites(2, server_rate=1000.0, site_rate=10.0)
    assert slow_site.down == 100 and slow_site.up == 50 + 1.0  # 1000 and 500 bytes at 10 a second
    fast_lines = of_sites(200, server_rate=1e9, site_rate=1e9)
    assert fast_lines.up == 200 * 1.0  # the line is free before an answer is in the mean


def test_server_memory_does_not_depend_on_the_number_of_sites() -> None:
    assert of_sites(6, 1e6, 1e6).server_memory == of_sites(200, 1e6, 1e6).server_memory


@pytest.mark.parametrize("aggregation", ["median", "trimmed_mean"])
def test_what_holds_all_differences_takes_their_memory_and_time(aggregation: str) -> None:
    settings = (f"federation.aggregation={aggregation}", "federation.minimum_sites=3")
    held = [of_sites(sites, 1e6, 1e6, *settings) for sites in (6, 200)]
    plain = of_sites(6, 1e6, 1e6)
    assert [one.server_memory - plain.server_memory for one in held] == [6 * 500, 200 * 500]
    # 3 s for the close of a round were measured with 3 answers
    assert [one.server for one in held] == [6 + 0.25, 200 + 0.25]


def test_the_plan_says_what_the_server_s_memory_grows_with() -> None:
    def said(*settings: str) -> str:
        return _held(Request("unet", [], 20, 1e6, 1e6, 100), experiment_of("unet", settings))

    assert said() == "whatever the number of sites"
    held = said("federation.aggregation=median", "federation.minimum_sites=3")
    assert held.startswith("which holds the differences of all 20 sites until the round has closed")


@pytest.mark.parametrize(("text", "rate"), [("100Mbit", 12.5e6), ("1.5 Gbit", 187.5e6), ("800kbit/s", 1e5)])
def test_a_bandwidth_in_bytes(text: str, rate: float) -> None:
    assert rate_of(text) == rate


@pytest.mark.parametrize("text", ["100", "100MB", "fast", "0Mbit", "-1Mbit", ""])
def test_what_is_no_bandwidth_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--sites", "2", f"--bandwidth={text}", "--model", "unet"])
    assert stopped.value.code == 2
    assert "write a number with kbit, Mbit or Gbit" in capsys.readouterr().err


def test_a_model_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--sites", "2", "--bandwidth", "1Gbit", "--model", "vgg"]) == 2
    assert "neither a job folder nor one of unet, densenet121" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["unet", "densenet121"])
def test_a_network_stands_for_the_job_that_uses_it(name: str) -> None:
    job = JOB.with_name({"unet": "harmofl_prostate", "densenet121": "harmofl_camelyon17"}[name])
    of_job, of_name = experiment_of(str(job), []), experiment_of(name, [])
    assert (of_name.network, of_name.data.height) == (of_job.network, of_job.data.height)
    assert of_name.training.batch_size == of_job.training.batch_size


def test_the_parts_of_a_job_are_measured(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LONGEST_MEASUREMENT", 0.1)
    start = Start(listens=0.5, ready=2.5, resident=1000)
    parts = parts_here(experiment_of(str(job), []), start)
    half = parts_here(experiment_of(str(job), ["federation.exchange=float16"]), start)
    assert parts.model < parts.up < parts.down + 2000 and half.up < 0.7 * parts.up
    assert half.down < 0.7 * parts.down and half.model == parts.model
    assert (parts.listens, parts.start, parts.process) == (0.5, 2.5, 1000)
    assert (
        min(
            parts.simulated_pace.training,
            parts.task,
            parts.pack_task,
            parts.unpack_answer,
            parts.add,
            parts.close,
            parts.pace.training,
        )
        > 0
    )


def test_a_plan_is_printed_with_what_a_busy_machine_makes_of_it(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--sites", "3", "--bandwidth", "10Mbit", "--images", "100", "--model", str(job)]
    monkeypatch.setattr("harmofl.app.plan.measure_parts", lambda _: PARTS)
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "what bounds the round: training and validation; a GPU" in told and "together" in told
    # 25 of the images are for validation: 3 x (7.7 + 75 + 5 + 3.25 + 1) + 0.55 s, busy 3 x (12.7 + 160 + 6.5 + 2) + 3.8
    assert "simulation: FLARE's simulator takes 5 minutes a round on this machine, one site after the other" in told
    assert "the start of a process takes 7.7 s of each site's part" in told
    assert "and a thread got 25% of a core" in told
    assert "precision: " in told
    # training with four threads: 4 x (50 + 2.5) s
    assert "a round takes 9 minutes in FLARE's simulator, and training and validation take a site 4 minutes." in told
    idle = replace(PARTS, pace=replace(PARTS.pace, share=1.0), simulated_pace=replace(PARTS.simulated_pace, share=1.0))
    monkeypatch.setattr("harmofl.app.plan.measure_parts", lambda _: idle)
    assert main(asked) == 0
    assert "busy" not in capsys.readouterr().out


def test_a_process_that_ends_while_it_measures_is_one_line(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(_: object) -> Parts:
        raise ChildProcessError("the process that measures ended with exit code -9; was there too little memory?")

    monkeypatch.setattr("harmofl.app.plan.measure_parts", ended)
    assert main(["plan", "--sites", "3", "--bandwidth", "10Mbit", "--model", str(job)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"harmofl plan: {job}: a training step cannot be measured (the process that measures ended")
    assert told.count("\n") == 1


@pytest.mark.parametrize(("asked", "offers"), [("float32", True), ("auto", False), ("bfloat16", False)])
def test_the_precision_that_is_not_set_is_offered(asked: str, offers: bool) -> None:
    line = _precision(experiment_of("unet", [f"training.precision={asked}"]))
    assert line.startswith(f"precision: {asked};") and ("training.precision=auto" in line) == offers


def test_the_minimums_of_a_job_are_said_and_held_against_the_number_of_sites(job: Path) -> None:
    enough, few = (Request(str(job), (), sites, 1e6, 1e6, images=100) for sites in (2, 1))  # the job needs 2
    sends, *more = _minimums(enough, experiment_of(str(job), ["amplitude.minimum_cases=5"]))
    assert sends.startswith("amplitude: a site of fewer training patients than 5 or its own limit sends none")
    assert sends.endswith("trains with the global one; 2 sites must send theirs") and not more
    _, round_needs, amplitude_needs = _minimums(few, experiment_of(str(job), []))
    assert round_needs == "federation.minimum_sites is 2: with 1 site the job fails; lower it"
    assert amplitude_needs.startswith("amplitude.minimum_sites is 2")
    assert len(_minimums(few, experiment_of(str(job), ["method=fedavg"]))) == 1, "no amplitude"
    assert _minimums(Request("unet", (), 1, 1e6, 1e6, images=100), experiment_of("unet", [])) == []


@pytest.mark.parametrize(
    ("stretch", "rates", "advice"),
    [
        ("model to all sites", (1e3, 1e6), "line at the server shortens it, and so does federation.exchange=float16"),
        ("model to all sites", (1e9, 1e1), "a faster line at the sites shortens it"),
        ("differences to the server", (1e2, 1e6), "line at the server shortens it, and so does federation.exchange"),
        ("differences to the server", (1e9, 1e9), "a faster core at the server"),  # 1 s each, whatever the lines
        ("training and validation at a site", (1e9, 1e9), "training.local_epochs"),
    ],
)
def test_advice_is_about_what_bounds_the_round(stretch: str, rates: tuple[float, float], advice: str) -> None:
    request = Request("unet", (), 10, *rates, images=100)
    assert advice in _advice(stretch, request, PARTS, "float32")
    assert "exchange" not in _advice(stretch, request, PARTS, "float16"), "it is that already"
