"""The ledger of releases: no two sets that left a site tell about few patients, whatever happens to the file."""

import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harmofl.flare.privacy_ledger import FOLDER, KEY_FILE, LEDGER_FILE, open_ledger, read_ledger
from harmofl.flare.releases import Answer, Offer, members_of, release
from harmofl.flare.site import SiteError
from harmofl.flare.wire import AmplitudeStatistic

LIMIT = 5
STATISTIC = {"region": "dc", "noise": None}


def offered(patients: str, run: str = "run1", weighted: bool = False, mark: str = "1", **other: Any) -> Offer:
    """A statistic of patients who are one letter and one image each."""
    members = members_of(patients, patients, [mark] * len(patients))
    return Offer("prostate", run, STATISTIC | other, members, weighted, LIMIT)


def measured(patients: str) -> AmplitudeStatistic:
    """A mean in which every patient can be recognized."""
    value = float(np.mean([2.0 ** "abcdefghijklmnopqrstuvwxyz".index(patient) for patient in patients]))
    return AmplitudeStatistic(np.full((3, 1), value, np.float32), len(patients), len(patients))


def ask(root: Path, patients: str, run: str = "run1", **other: Any) -> Answer:
    return release(root, offered(patients, run, **other), lambda: measured(patients))


def value_of(answer: Answer) -> float | None:
    return None if answer.statistic is None else float(answer.statistic.values[0, 0])


def test_the_same_set_again_is_allowed_and_counted(tmp_path: Path) -> None:
    first = ask(tmp_path, "abcdefg")
    again = ask(tmp_path, "gfedcba", "run2")
    other = ask(tmp_path, "abcdefg", "run3", region="low")
    assert [answer.outcome for answer in (first, again, other)] == ["new", "repeated", "new"]
    assert first.statistic is not None and again.statistic is not None
    assert first.statistic.values.tobytes() == again.statistic.values.tobytes()
    assert other.counts == {"new": 2, "repeated": 1, "withheld": 0}
    ledger = read_ledger(tmp_path)
    assert ledger is not None and [entry.runs for entry in ledger.content.releases] == [("run1", "run2"), ("run3",)]


@pytest.mark.parametrize(
    ("patients", "is_new"),
    [("abcdefgh", False), ("abcdef", False), ("abcdefz", False), ("abcdefghijk", False), ("abcdefghijkl", True)],
)
def test_of_a_close_set_the_earlier_statistic_is_sent(tmp_path: Path, patients: str, is_new: bool) -> None:
    first = ask(tmp_path, "abcdefg")
    second = ask(tmp_path, patients, "run2")
    assert (second.outcome == "new") == is_new
    assert value_of(second) == value_of(first if not is_new else Answer("new", measured(patients)))
    # another statistic of a close set would tell as much: dc is a part of low
    third = ask(tmp_path, patients, "run3", region="low")
    assert (third.outcome, value_of(third)) == (("new", value_of(second)) if is_new else ("withheld", None))


def test_new_patients_wait_until_enough_have_come(tmp_path: Path) -> None:
    sent = [ask(tmp_path, "abcdefghijkl"[:count], f"run{count}") for count in range(7, 13)]
    assert [answer.outcome for answer in sent] == ["new", *["withheld"] * 4, "new"]
    assert len({value_of(answer) for answer in sent}) == 2
    assert sent[-1].counts == {"new": 2, "repeated": 4, "withheld": 4}


def test_another_rule_that_finds_patients_in_names_makes_no_new_set(tmp_path: Path) -> None:
    ask(tmp_path, "abcdefg")
    cases = "abcdefgh"
    members = members_of(cases, [f"rule {case}" for case in cases], ["1"] * 8)
    answer = release(tmp_path, Offer("prostate", "run2", STATISTIC, members, False, LIMIT), lambda: measured(cases))
    assert answer.outcome == "withheld"


def test_one_image_more_of_one_patient_is_held_back(tmp_path: Path) -> None:
    ask(tmp_path, "abcdefg")
    cases = "abcdefgg"
    members = members_of(cases, cases, ["1"] * 8)
    answer = release(tmp_path, Offer("prostate", "run2", STATISTIC, members, False, LIMIT), lambda: measured(cases))
    assert answer.outcome == "withheld" and value_of(answer) == value_of(Answer("new", measured("abcdefg")))


def test_another_choice_of_images_makes_no_close_set_of_patients_new(tmp_path: Path) -> None:
    # h's images are the most of what two sums differ by, though each case has one image more in the second
    assert ask(tmp_path, "abcdefg").outcome == "new"
    assert ask(tmp_path, "abcdefgh", "run2", mark="2", reader="all").outcome == "withheld"
    assert ask(tmp_path, "abcdef", "run3", mark="2", reader="all").outcome == "withheld"
    assert ask(tmp_path, "abcdefg", "run4", mark="2", reader="all").outcome == "new"
    assert ask(tmp_path, "abcdefghijkl", "run5", mark="3", reader="foreground").outcome == "new"


def test_means_of_other_weights_are_not_released_of_the_same_patients(tmp_path: Path) -> None:
    assert ask(tmp_path, "abcdefg").outcome == "new"
    momentum = {"weighted": True, "estimation": "running_mean"}
    assert ask(tmp_path, "abcdefg", "run2", mark="0.9", **momentum).outcome == "withheld"
    assert ask(tmp_path, "hijklmn", "run3", mark="0.9", **momentum).outcome == "new"
    assert ask(tmp_path, "hijklmn", "run4", mark="0.9", **momentum).outcome == "repeated"
    assert ask(tmp_path, "hijklmn", "run5", mark="0.8", **momentum).outcome == "withheld"


def test_tasks_and_sites_do_not_hold_each_other_up(tmp_path: Path) -> None:
    ask(tmp_path / "HK", "abcdefg")
    assert ask(tmp_path / "UCL", "abcdefgh").outcome == "new"
    other = Offer("nuclei", "run2", STATISTIC, offered("abcdefgh").members, False, LIMIT)
    assert release(tmp_path / "HK", other, lambda: measured("abcdefgh")).outcome == "new"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from("abcdefghijkl"), min_size=5), st.booleans()), max_size=6))
def test_no_two_released_sets_differ_by_few(asked: list[tuple[set[str], bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sent = []
        for number, (patients, is_low) in enumerate(asked):
            chosen = "".join(sorted(patients))
            answer = ask(Path(folder), chosen, f"run{number}", region="low" if is_low else "dc")
            if answer.outcome == "new":
                sent.append(patients)
        assert all(len(one ^ other) not in range(1, LIMIT) for one in sent for other in sent)
        assert bool(sent) == bool(asked)


def _ask_in_a_process(root: Path, patients: str, number: int, started: Any) -> None:
    started.wait()
    ask(root, patients, f"run{number}")


def test_two_jobs_at_once_release_one_of_two_close_sets(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    started = processes.Barrier(4)
    sets = ["abcdefg", "abcdefgh", "abcdefghi", "abcdefgij"]
    jobs = [
        processes.Process(target=_ask_in_a_process, args=(tmp_path, patients, number, started))
        for number, patients in enumerate(sets)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0, 0, 0]
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert (len(ledger.content.releases), len(ledger.content.withheld)) == (1, 3)
    assert ledger.content.releases[0].sent == 4


def _die_after_writing(root: Path) -> None:
    ask(root, "abcdefg")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_site_that_dies_between_writing_and_sending_counts_it_as_sent(tmp_path: Path) -> None:
    job = multiprocessing.get_context("fork").Process(target=_die_after_writing, args=(tmp_path,))
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL
    assert ask(tmp_path, "abcdefgh", "run2").outcome == "withheld"
    # the run that died asks again and gets what it was to get
    again = ask(tmp_path, "abcdefg")
    assert (again.outcome, value_of(again)) == ("repeated", value_of(Answer("new", measured("abcdefg"))))


def test_nothing_is_kept_of_a_release_that_could_not_be_measured(tmp_path: Path) -> None:
    def fail() -> AmplitudeStatistic:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError):
        release(tmp_path, offered("abcdefg"), fail)
    assert ask(tmp_path, "abcdefgh", "run2").outcome == "new"


def flip(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"sent": 1', '"sent": 2'))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def remove(path: Path) -> None:
    path.unlink()


def drop_a_release(path: Path) -> None:
    held = json.loads(path.read_text())
    held["content"]["releases"] = []
    path.write_text(json.dumps(held))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change(path: Path) -> None:
    path.write_bytes(bytes(32))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (LEDGER_FILE, flip, "is damaged, was edited or belongs to another key"),
        (LEDGER_FILE, cut, "is damaged"),
        (LEDGER_FILE, empty, "is damaged"),
        (LEDGER_FILE, drop_a_release, "was edited"),
        (LEDGER_FILE, remove, "is missing beside its key"),
        (KEY_FILE, remove, "has lost its key"),
        (KEY_FILE, cut, "belongs to another key"),
        (KEY_FILE, change, "belongs to another key"),
        (KEY_FILE, empty, "has a damaged key"),
    ],
)
def test_a_damaged_ledger_is_refused_and_never_begun_anew(tmp_path: Path, name: str, damage: Any, said: str) -> None:
    ask(tmp_path, "abcdefg")
    damage(tmp_path / FOLDER / name)
    if damage is cut and name == KEY_FILE:
        (tmp_path / FOLDER / name).write_bytes(b"x" * 32)
    before = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    for attempt in (lambda: ask(tmp_path, "abcdefgh", "run2"), lambda: read_ledger(tmp_path)):
        with pytest.raises(SiteError, match=said) as caught:
            attempt()
        assert caught.value.code == "privacy_ledger"
        assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}


def test_a_site_that_was_stopped_while_it_began_its_ledger_begins_it(tmp_path: Path) -> None:
    with open_ledger(tmp_path):
        pass
    (tmp_path / FOLDER / KEY_FILE).unlink()
    held = read_ledger(tmp_path)
    assert held is not None and held.content.releases == ()
    assert ask(tmp_path, "abcdefg").outcome == "new"


def test_no_name_stands_in_the_ledger_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    members = members_of(["Jane_Doe_1", "Jane_Doe_2"] * 3, ["Jane_Doe"] * 6, ["1"] * 6)
    release(tmp_path, Offer("prostate", "run1", STATISTIC, members, False, 1), lambda: measured("a"))
    for path in (tmp_path / FOLDER).iterdir():
        assert b"Jane" not in path.read_bytes() and path.stat().st_mode & 0o077 == 0
    with open_ledger(tmp_path) as ledger:
        assert ledger.hash_of("prostate", "case", "Jane_Doe_1") in (tmp_path / FOLDER / LEDGER_FILE).read_text()
    ask(tmp_path / "other", "a")
    with open_ledger(tmp_path / "other") as other:
        assert other.hash_of("x") != ledger.hash_of("x"), "every site has a key of its own"


def test_a_folder_that_cannot_be_written_is_named_without_its_path(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder belongs")
    with pytest.raises(SiteError, match="privacy ledger cannot be used") as caught:
        ask(tmp_path, "abcdefg")
    assert str(tmp_path) not in str(caught.value)
