"""A lead who asks a hospital about its patients' names by the settings of jobs, one question a job."""

import csv
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from harmofl.data.synthetic import write_prostate_site
from harmofl.data.synthetic_histology import write_nuclei_site, write_patches_site
from harmofl.experiment import ExperimentError, set_key
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.server_run import open_run
from harmofl.flare.task_header import TaskHeader
from harmofl.flare.wire import read_error, unpack_update
from harmofl.tasks import resolve_experiment

CASES = 8
VISITS = {1: "Ja_1", 2: "Ja_2", 3: "Ja_3", 4: "Ja_4"}  # cases 1 to 4 are visits of one patient
HANGS = r"^(([A-Za-z0-9_-])+)+\.$"


class Workspace:
    """As much of FLARE's workspace as a task needs: where the job lies, where state is kept.

    Each job finds a hospital without a ledger, so that the split of an earlier one bounds no question.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.folder, self.job = folder, job

    def get_root_dir(self) -> str:
        return str(self.folder / f"kit_of_{self.job}")

    def get_app_config_dir(self, job_id: str) -> str:
        return str(self.folder / job_id)


Ask = Callable[..., Shareable]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The answer of site HK to the first task of a job with these settings; every question is a job of its own."""
    monkeypatch.setattr("harmofl.flare.lean_monai.import_lean_monai", lambda: None)
    monkeypatch.delenv("HARMOFL_STATE_ROOT", raising=False)
    asked = 0

    def ask(settings: dict[str, Any], root: Path, *, simulated: bool = False, **scope: Any) -> Shareable:
        nonlocal asked
        asked += 1
        monkeypatch.setenv("HARMOFL_DATA_ROOT", str(root))
        context = hospital(tmp_path, f"job{asked}", settings, simulated, scope)
        task = TaskHeader(run_id=f"job{asked}", experiment_hash=hash_of(settings), demo=False, round_number=0).attach(
            Shareable()
        )
        return HarmoFLExecutor().execute("amplitude", task, context, Signal())

    return ask


def hospital(folder: Path, job: str, settings: dict[str, Any], simulated: bool, scope: dict[str, Any]) -> FLContext:
    (folder / job).mkdir()
    (folder / job / "experiment.json").write_text(json.dumps(settings))
    context = FLContextManager(None, "HK", job, {}, {}).new_context()
    context.set_prop(ReservedKey.IDENTITY_NAME, "HK")
    context.set_prop(FLContextKey.SIMULATE_MODE, simulated)
    context.set_prop(FLContextKey.JOB_META, {"submitter_name": "lead@hk.org", "submitter_org": "hk"})
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(folder, job))
    limits = {"minimum_sites": 2, "training_patients": 1, **scope.get("limits", {})}
    context.set_prop(FLContextKey.SCOPE_PROPERTIES, {"device": "cpu", **scope, "limits": limits})
    return context


def hash_of(settings: dict[str, Any]) -> str:
    return resolve_experiment(settings).hash


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hospital of eight cases, four of which are of one patient by their names."""
    root = tmp_path_factory.mktemp("volumes") / "HK"
    write_prostate_site(root, "siemens_1.5t_endorectal", CASES, 0, matrix=64, slices=3)
    for path in sorted(root.iterdir()):
        for number, name in VISITS.items():
            if path.name.startswith(f"Case{number:02}"):
                path.rename(path.with_name(path.name.replace(f"Case{number:02}", name)))
    assert sum(path.name.startswith("Ja_") for path in root.iterdir()) == 2 * len(VISITS)
    return root


def counts(answer: Shareable) -> Any:
    """What a lead sees of an answer without opening arrays: numbers, and how many patients stand behind it."""
    if answer.get_return_code() != ReturnCode.OK:
        return read_error(answer)
    update = unpack_update(answer)
    return update.numbers["cases"], update.amplitude.patients if update.amplitude else None


def guessed(ask: Ask, settings: dict[str, Any], root: Path, *, simulated: bool) -> str:
    """The adversary: a prefix, letter by letter. A right guess makes one patient of several, and the counts differ."""
    prefix = ""
    for _ in range(2):
        set_key(settings, "data.patient_pattern", "^(zz)")
        nobody = counts(ask(settings, root, simulated=simulated))
        for letter in "BJa":
            set_key(settings, "data.patient_pattern", f"^({prefix}{letter})")
            if counts(ask(settings, root, simulated=simulated)) != nobody:
                prefix += letter
                break
    return prefix


def test_a_job_cannot_spell_a_patients_name_letter_by_letter(ask: Ask, written: dict[str, Any], volumes: Path) -> None:
    set_key(written, "amplitude.minimum_cases", 1)
    # where a job may set a pattern the attack works: what it finds at a hospital below is no weakness of the attack
    assert guessed(ask, written, volumes, simulated=True) == "Ja"
    assert guessed(ask, written, volumes, simulated=False) == ""


@pytest.mark.parametrize("pattern", ["^(Ja)", HANGS, ".", "(" * 90 + ")" * 90])
def test_a_pattern_of_a_job_never_meets_a_file_name(
    ask: Ask, written: dict[str, Any], volumes: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr("harmofl.tasks.prostate.find_cases", lambda folder: pytest.fail("the folder was read"))
    set_key(written, "data.patient_pattern", pattern)
    started = time.monotonic()
    code, line = read_error(ask(written, volumes))
    assert code == "ExperimentError" and time.monotonic() - started < 5
    assert line.startswith("site HK: data.patient_pattern: hospitals run no pattern of a job on file names")
    assert "data.patient_from" in line and "local/privacy.json" in line


def test_the_server_refuses_it_before_any_site_is_asked(written: dict[str, Any], tmp_path: Path) -> None:
    set_key(written, "data.patient_pattern", "^(Ja)")
    with pytest.raises(
        ExperimentError, match=r"data\.patient_pattern: hospitals run no pattern of a job on file names"
    ):
        open_run(hospital(tmp_path, "job", written, False, {}), ["HK"])


def test_the_sites_own_pattern_says_whose_a_case_is(ask: Ask, written: dict[str, Any], volumes: Path) -> None:
    set_key(written, "amplitude.minimum_cases", 1)
    own = {"minimum_cases": 1, "patient_pattern": "^([A-Za-z]+[0-9]*)_?"}
    # by hand: Ja_1 to Ja_4 are Ja, Case05 to Case08 four more; of 5 patients in blocks of 25 at least 1 validates and
    # 1 is tested, so that at most 3 train; without a pattern 8 patients give 8 - 2 or fewer, and each is one case
    cases, patients = counts(ask(written, volumes, **own))
    assert sum(cases.values()) == CASES and patients <= 3
    plain, each = counts(ask(written, volumes, minimum_cases=1))
    assert each == plain["training"] > 3
    set_key(written, "data.patient_from", "before_separator")
    assert counts(ask(written, volumes, minimum_cases=1)) == (cases, patients), "the closed form tells the same here"
    assert counts(ask(written, volumes, **own, limits={})) == (cases, patients), "and the site's word comes before it"


def test_a_line_about_the_sites_own_names_does_not_tell_them(ask: Ask, written: dict[str, Any], volumes: Path) -> None:
    for wrong in ({"patient_pattern": "^(Jane"}, {"patient_pattern": "^((Jane)+)+"}, {"folder": "../Jane"}):
        code, line = read_error(ask(written, volumes, **wrong))
        (key,) = wrong
        assert code == key and f"local/privacy.json: {key}: " in line and "Jane" not in line


def test_a_job_cannot_ask_whether_a_folder_is_there(ask: Ask, written: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_prostate_site(root / "Jane", "siemens_1.5t_endorectal", 4, 0, matrix=64, slices=3)
    set_key(written, "amplitude.minimum_cases", 1)
    answers = []
    for name in ("Jane", "Joan"):
        set_key(written, "data.aliases", {"HK": [name]})
        answers.append(counts(ask(written, root, minimum_cases=1)))
    assert answers[0] == answers[1] == ("data_root", "site HK: its data folder cannot be used; see the site's log")
    set_key(written, "data.aliases", {"HK": ["Jane"]})
    assert counts(ask(written, root, simulated=True))[0]["training"] > 0, "in simulation an alias is a folder"
    cases, _ = counts(ask(written, root, minimum_cases=1, folder="jane"))
    assert sum(cases.values()) == 4, "at a hospital the site's own word names it, in any letter case"


def test_a_job_cannot_count_the_rows_of_a_center(ask: Ask, written: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "HK"
    write_patches_site(root, "red_pink", [3], slides=6, patches=24, seed=0, size=64)
    settings = patches_job(written)
    answers = []
    for centers in ([3], [0], [0, 3]):
        settings["reader"] = {"centers": {"HK": centers}}
        answers.append(counts(ask(settings, root, minimum_cases=1)))
    assert answers[0] == answers[1] == answers[2] and sum(answers[0][0].values()) == 24
    assert counts(ask(settings, root, simulated=True))[0] == "data_root", "in simulation the job says which rows"
    with (root / "metadata.csv").open(newline="") as stream:
        header, *rows = csv.reader(stream)
    place = header.index("center")
    rows = [[*row[:place], "4" if number % 2 else "3", *row[place + 1 :]] for number, row in enumerate(rows)]
    with (root / "metadata.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    assert counts(ask(settings, root))[0] == "data_root", "of two centers the site has to say which is its own"
    cases, _ = counts(ask(settings, root, minimum_cases=1, centers=[4]))
    assert sum(cases.values()) == 12


def patches_job(written: dict[str, Any]) -> dict[str, Any]:
    changes = {
        "task": "camelyon17",
        "network": {"name": "densenet121", "width": 4, "norm": "batch"},
        "reader": {"centers": {"HK": [3]}},
    }
    settings = written | changes
    set_key(settings, "amplitude.minimum_cases", 1)
    return settings


def test_a_job_cannot_move_a_threshold_over_the_intensities_of_single_images(
    ask: Ask, written: dict[str, Any], volumes: Path
) -> None:
    """Volumes are counted that have one intensity in more than this share of their voxels, and the counts leave."""
    for percentile in (98.76, 50.001, 99.01):
        set_key(written, "reader.upper_percentile", percentile)
        code, line = read_error(ask(written, volumes))
        assert code == "ExperimentError"
        assert "reader.upper_percentile: hospitals take 95, 98, 99, 99.5, 99.9, 100, others in a simulated" in line
    set_key(written, "reader.upper_percentile", 99.5)
    set_key(written, "amplitude.minimum_cases", 1)
    assert counts(ask(written, volumes, minimum_cases=1))[0]["training"] > 0


def test_a_network_above_the_sites_limit_takes_no_memory(
    ask: Ask, written: dict[str, Any], volumes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harmofl.tasks.prostate.find_cases", lambda folder: pytest.fail("the folder was read"))
    set_key(written, "network.width", 512)  # 2.0 billion parameters: 8 GB, and five times that to train them
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, line = read_error(ask(written, volumes))
    assert code == "parameters" and "limits.parameters here is 100000000; lower network.width" in line
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 500_000  # KB
    set_key(written, "network.width", 8)
    code, line = read_error(ask(written, volumes, limits={"parameters": 1000}))
    assert code == "parameters" and "limits.parameters here is 1000" in line


def test_the_sites_own_pattern_holds_for_images_of_nuclei(ask: Ask, written: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "HK"
    write_nuclei_site(root, "lung", patients=6, images=6, seed=0, size=64)
    settings = written | {"task": "nuclei", "reader": {"classes": "nucleus"}}
    set_key(settings, "amplitude.minimum_cases", 1)
    _, patients = counts(ask(settings, root, minimum_cases=1))
    assert patients > 1
    # by hand: the barcodes of the synthetic data begin with DEMO, so that all six images are of one patient and train
    cases, patients = counts(ask(settings, root, minimum_cases=1, patient_pattern="^DEMO"))
    assert (cases, patients) == ({"training": 6, "validation": 0, "test": 0}, 1)
