"""`harmofl privacy`: what left a site and what was spent, for whoever answers for it; purge leaves the ledger alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from harmofl.app.cli import main
from harmofl.app.kit import KitError, open_kit
from harmofl.app.preflight import preflight
from harmofl.app.privacy import check_ledger
from harmofl.data.splits import KeptParts
from harmofl.evidence.results import NoiseStatement
from harmofl.flare.privacy_ledger import FOLDER, KEY_FILE, LEDGER_FILE, KeptSplit, open_ledger, read_ledger
from harmofl.flare.releases import Offer, members_of, release
from harmofl.flare.wire import AmplitudeStatistic

STATISTIC = {
    "region": "site_gain",
    "intensity": "zscore",
    "estimation": "before_training",
    "channels": 3,
    "height": 384,
    "width": 384,
}


def send(root: Path, patients: str, run: str, epsilon: float | None = None) -> None:
    noise = None
    if epsilon is not None:
        noise = NoiseStatement(
            mechanism="analytic_gaussian", epsilon=epsilon, delta=1e-5, clip=1.0, patients=len(patients), sigma=1.0
        )
    members = members_of(patients, patients, ["1"] * len(patients))
    described = STATISTIC | {"noise": epsilon}
    measured = AmplitudeStatistic(np.ones((3, 17), np.float32), 40, len(patients), noise=noise)
    release(root, Offer("prostate", run, described, members, False, 5), lambda: measured)


def leave_split(root: Path, seed: int = 0) -> None:
    kept = KeptParts(lambda patient: None)
    kept.used = {"a": "train", "b": "train", "c": "val", "d": "test"}
    settings = {"seed": seed, "fractions": [0.64, 0.16, 0.2], "split": "patient", "patient_pattern": None}
    with open_ledger(root) as ledger:
        parts = {ledger.hash_of("prostate", "split", patient): part for patient, part in kept.used.items()}
        split = KeptSplit(settings=settings, parts=parts, whole=None, run="run1", since="2026-11-30 12:00:00")
        ledger.content = ledger.content.model_copy(update={"splits": {"prostate": split}})


@pytest.fixture
def root(site: Path) -> Path:
    """The state root of a site from which nothing has left."""
    return site / "harmofl"


def test_a_site_from_which_nothing_has_left_gets_no_ledger_by_looking(
    site: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["privacy", str(site)]) == 0
    assert "nothing has left HK" in capsys.readouterr().out
    assert not root.exists()


def test_what_left_what_was_spent_and_what_was_held_back(
    site: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    send(root, "abcdefg", "run1", epsilon=1.0)
    send(root, "abcdefg", "run2", epsilon=1.0)  # sent again: the same array costs nothing
    send(root, "abcdefg", "run3", epsilon=0.5)
    send(root, "abcdefgh", "run4", epsilon=1.0)  # held back, no. 1 instead
    send(root, "abcdefghijkl", "run5", epsilon=2.0)
    leave_split(root)
    assert main(["privacy", str(site)]) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert any(
        row.startswith("1 prostate site_gain after zscore, 384 x 384, before_training 7 40 epsilon 1, delta 1e-05")
        for row in rows
    )
    [first] = [row for row in rows if row.startswith("1 prostate")]
    assert first.endswith("3 3"), "sent three times, to three runs"
    # 1 + 0.5 + 2 and three times 1e-5
    assert "prostate, in all: epsilon 3.5, delta 3e-05 by 3 releases with noise" in rows
    assert "set of 7 patients (no. 1, 2): epsilon 1.5, delta 2e-05 by 2 releases with noise" in rows
    assert "set of 12 patients (no. 3): epsilon 2, delta 1e-05 by 1 release with noise" in rows
    [held] = [row for row in rows if "of 8 patients" in row]
    assert held.endswith("of 8 patients: no. 1 was sent in its place (run run4)")
    assert any(
        row.startswith("prostate: 2 training, 1 validation, 1 test; seed 0, fractions 0.64, 0.16, 0.2") for row in rows
    )
    assert "Weight differences and scores leave beside them in every run" in out


def test_where_an_array_left_without_noise_nothing_bounds_it(
    site: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send(root, "abcdefg", "run1", epsilon=1.0)
    send(root, "abcdefg", "run2")
    assert main(["privacy", str(site)]) == 0
    said = "prostate, in all: no bound, 1 release without noise; epsilon 1, delta 1e-05 by 1 release with noise"
    assert said in capsys.readouterr().out


def test_a_split_is_given_up_on_purpose_only_and_that_stays_in_the_ledger(
    site: Path, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_split(root)
    assert main(["privacy", str(site), "--reset-split", "prostate"]) == 1  # nobody is there to ask
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for typed in ("yes", ""):
        monkeypatch.setattr("builtins.input", lambda prompt, typed=typed: typed)
        assert main(["privacy", str(site), "--reset-split", "prostate"]) == 1
    held = read_ledger(root)
    assert held is not None and "prostate" in held.content.splits
    monkeypatch.setattr("builtins.input", lambda prompt: "prostate")
    assert main(["privacy", str(site), "--reset-split", "prostate"]) == 0
    leave_split(root, seed=1)
    assert main(["privacy", str(site), "--reset-split", "prostate", "--yes"]) == 0
    capsys.readouterr()
    assert main(["privacy", str(site)]) == 0
    assert capsys.readouterr().out.count("a split of 4 patients was given up here") == 2


def test_mistakes_are_one_line(
    site: Path, root: Path, server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_split(root)
    for arguments, said in (
        ([str(site), "--reset-split", "nuclei"], "keeps no split of this task; there is one of prostate"),
        ([str(server)], "is not the kit of a site"),
        ([str(tmp_path / "none")], "is not a startup kit"),
    ):
        assert main(["privacy", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("harmofl privacy: ") and err.count("\n") == 1 and said in err
    (root / FOLDER / KEY_FILE).unlink()
    assert main(["privacy", str(site)]) == 2
    err = capsys.readouterr().err
    assert "privacy ledger has lost its key (ledger.key); put the file back from a copy" in err
    assert err.count("\n") == 1


def test_purge_takes_the_runs_and_leaves_the_ledger(site: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    send(root, "abcdefg", "run1")
    (root / "state" / "run1").mkdir(parents=True)
    (root / "cache").mkdir()
    before = (root / FOLDER / LEDGER_FILE).read_bytes()
    assert main(["purge", str(site), "--all", "--cache"]) == 0
    assert main(["purge", str(site)]) == 0
    assert "the privacy ledger in" in capsys.readouterr().out
    assert (root / FOLDER / LEDGER_FILE).read_bytes() == before and (root / FOLDER / KEY_FILE).exists()
    assert not (root / "state" / "run1").exists() and not (root / "cache").exists()


def ledger_lines(site: Path) -> list[str]:
    return [str(check) for check in check_ledger(open_kit(site), None)]


@pytest.mark.usefixtures("data")
def test_preflight_shows_the_ledger_and_a_job_that_would_be_refused(
    site: Path, root: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ledger_lines(site) == ["note: ledger: nothing has left this site so far; its first job begins the ledger"]
    send(root, "abcdefg", "run1")
    send(root, "abcdefgh", "run2")
    leave_split(root)
    [line] = ledger_lines(site)
    assert line.startswith("ok: ledger: prostate: 1 release, 1 sent again, 1 held back, split since 2026-11-30")
    path = job / "app/config/experiment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seed": 7}))
    # the split that preflight shows is the kept one: all three cases train
    with open_ledger(root) as ledger:
        names = {patient: ledger.hash_of("prostate", "split", patient) for patient in ("Case00", "Case01", "Case02")}
        split = ledger.content.splits["prostate"].model_copy(update={"parts": dict.fromkeys(names.values(), "train")})
        ledger.content = ledger.content.model_copy(update={"splits": {"prostate": split}})
    assert preflight(site, job, []) == 1
    shown = capsys.readouterr().out.splitlines()
    assert any("3 training, 0 validation, 0 test" in line for line in shown), shown
    [line] = [line for line in shown if line.startswith("error: split")]
    assert "this job has seed 7 instead of 0" in line and f"harmofl privacy {site} --reset-split prostate" in line
    (root / FOLDER / LEDGER_FILE).write_text("{}")
    with pytest.raises(KitError, match="privacy ledger .* is damaged"):
        ledger_lines(site)
