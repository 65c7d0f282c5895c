"""State files: the old or the new content, never half; two generations; a checkpoint that stands alone."""

import json
import os

import pytest
import torch

from harmofl.flare import state
from harmofl.flare.state import Checkpoint, SiteState, StateError, save_atomically, write_text_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_in_the_middle(content, file):
    file.write(b"half of a file")
    raise OSError("no space left on device")


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    path = tmp_path / "a.pt"
    save_atomically({"value": torch.tensor(1)}, path)

    def fail(content, file):
        file.write(b"half of a file")
        raise error

    monkeypatch.setattr(state.torch, "save", fail)
    with pytest.raises(type(error)):
        save_atomically({"value": torch.tensor(2)}, path)
    assert names(tmp_path) == ["a.pt"]
    assert torch.load(path, weights_only=True)["value"] == 1


def test_a_failing_replacement_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    save_atomically({"value": torch.tensor(1)}, path)

    def fail(source, target):
        raise PermissionError("read-only")

    monkeypatch.setattr(state.os, "replace", fail)
    with pytest.raises(PermissionError):
        save_atomically({"value": torch.tensor(2)}, path)
    assert names(tmp_path) == ["a.pt"]
    assert torch.load(path, weights_only=True)["value"] == 1


def test_the_content_is_on_the_disk_before_the_old_file_is_replaced(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(state.os, "fsync", lambda handle: (order.append("sync"), fsync(handle)))
    monkeypatch.setattr(state.os, "replace", lambda *paths: (order.append("replace"), replace(*paths)))
    save_atomically({}, tmp_path / "a.pt")
    assert order == ["sync", "replace"]


def test_text_is_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_text_atomically("α old", path)
    assert path.read_text(encoding="utf-8") == "α old"

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(state.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text_atomically("new", path)
    assert names(tmp_path) == ["results.json"]
    assert path.read_text(encoding="utf-8") == "α old"


def content(number):
    return {"optimizer": {"alpha": 0.05, "moments": torch.full((3,), float(number))}}


def loaded(site, number):
    held = site.load_round(number)
    return None if held is None else float(held["optimizer"]["moments"][0])


def test_two_generations_are_kept(tmp_path):
    site = SiteState(tmp_path, "run1")
    for number in range(5):
        site.save_round(number, content(number))
    assert [loaded(site, number) for number in range(5)] == [None, None, None, 3.0, 4.0]
    assert names(tmp_path / "run1") == ["round_000003.pt", "round_000004.pt"]


def test_a_site_one_round_ahead_steps_back(tmp_path):
    # the server resumes at round 4 from a checkpoint, but this site had finished round 4 already
    site = SiteState(tmp_path, "run1")
    for number in range(5):
        site.save_round(number, content(number))
    assert loaded(site, 3) == 3.0
    site.save_round(4, content(40))
    assert (loaded(site, 3), loaded(site, 4)) == (3.0, 40.0)


def test_what_was_done_beyond_the_resumed_round_is_forgotten(tmp_path):
    site = SiteState(tmp_path, "run1")
    for number in (7, 8):
        site.save_round(number, content(number))
    site.save_round(6, content(60))
    assert [loaded(site, number) for number in (6, 7, 8)] == [60.0, None, None]


def test_saving_one_round_twice_keeps_the_round_before(tmp_path):
    site = SiteState(tmp_path, "run1")
    for number in (1, 2, 2):
        site.save_round(number, content(number))
    assert [loaded(site, number) for number in (1, 2)] == [1.0, 2.0]


def test_a_failed_save_keeps_both_generations(tmp_path, monkeypatch):
    site = SiteState(tmp_path, "run1")
    for number in (0, 1):
        site.save_round(number, content(number))
    monkeypatch.setattr(state.torch, "save", fail_in_the_middle)
    with pytest.raises(OSError, match="no space"):
        site.save_round(2, content(2))
    assert [loaded(site, number) for number in (0, 1, 2)] == [0.0, 1.0, None]
    assert names(tmp_path / "run1") == ["round_000000.pt", "round_000001.pt"]


def test_runs_do_not_share_their_state(tmp_path):
    first, second = SiteState(tmp_path, "run1"), SiteState(tmp_path, "run2")
    first.save_round(0, content(0))
    first.save_once("amplitude", {"own": torch.ones(2)})
    assert second.load_round(0) is None
    assert second.load_once("amplitude") is None


def test_what_holds_for_the_whole_run_survives_its_rounds(tmp_path):
    SiteState(tmp_path, "run1").save_once("amplitude", {"own": torch.ones(2), "images": 5})
    site = SiteState(tmp_path, "run1")  # a new process
    for number in range(4):
        site.save_round(number, content(number))
    held = site.load_once("amplitude")
    assert held is not None
    assert torch.equal(held["own"], torch.ones(2))
    assert held["images"] == 5


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "../other", "a b", "a.b"])
def test_a_run_id_cannot_lead_out_of_the_folder(tmp_path, run_id):
    with pytest.raises(StateError, match="letters and digits"):
        SiteState(tmp_path, run_id)


@pytest.mark.parametrize("damage", [b"", b"half of a file", None])
def test_a_damaged_state_is_named(tmp_path, damage):
    site = SiteState(tmp_path, "run1")
    site.save_round(3, content(3))
    path = tmp_path / "run1" / "round_000003.pt"
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    with pytest.raises(StateError, match="round_000003.pt cannot be read") as caught:
        site.load_round(3)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def flip(path, count=64):
    """Flip all bits of some bytes in the middle of a file, as a disk or a copy may do."""
    whole = bytearray(path.read_bytes())
    start = len(whole) // 2
    whole[start : start + count] = bytes(255 - byte for byte in whole[start : start + count])
    path.write_bytes(whole)


def test_a_state_with_flipped_bytes_is_named(tmp_path):
    site = SiteState(tmp_path, "run1")
    site.save_round(3, {"moments": torch.zeros(10_000)})  # 40 kB of the file, so that its middle is in them
    path = tmp_path / "run1" / "round_000003.pt"
    flip(path)
    assert not torch.equal(torch.load(path, weights_only=True)["moments"], torch.zeros(10_000)), "torch says nothing"
    with pytest.raises(StateError, match=r"^round_000003.pt is damaged \(the checksum of \S+ in it differs\); [^\n]+$"):
        site.load_round(3)


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_file_that_would_run_code_is_refused(tmp_path):
    site = SiteState(tmp_path, "run1")
    site.save_round(3, {"evil": Evil()})
    with pytest.raises(StateError, match="UnpicklingError"):
        site.load_round(3)


def checkpoint(**changes):
    values = {
        "model": {"w": torch.arange(3.0), "count": torch.tensor(4)},
        "experiment": {"name": "small", "training": {"learning_rate": 0.1}},
        "experiment_hash": "89c82bf707d952a8",
        "run_id": "0123abcd",
        "next_round": 5,
        "amplitude": torch.ones(3, 4),
        "amplitude_images": 17,
        "amplitude_sites": ("A", "B"),
        "record": {"best_round": 3, "best_score": 0.5, "rounds": [], "bytes_sent": {"A": {"weights": 1}}},
    }
    return Checkpoint(**(values | changes))


def test_a_checkpoint_comes_back(tmp_path):
    checkpoint().save(tmp_path / "model.pt")
    held, expected = vars(Checkpoint.load(tmp_path / "model.pt")), vars(checkpoint())
    assert held.keys() == expected.keys()
    model, amplitude = held.pop("model"), held.pop("amplitude")
    assert torch.equal(amplitude, expected.pop("amplitude"))
    assert all(torch.equal(value, model[name]) for name, value in expected.pop("model").items())
    assert held == expected


def test_a_checkpoint_without_amplitude_comes_back(tmp_path):
    sent = checkpoint(amplitude=None, amplitude_images=0, amplitude_sites=())
    sent.save(tmp_path / "model.pt")
    held = Checkpoint.load(tmp_path / "model.pt")
    assert (held.amplitude, held.amplitude_images, held.amplitude_sites) == (None, 0, ())


def test_a_checkpoint_opens_without_this_package_and_without_pickle(tmp_path):
    checkpoint().save(tmp_path / "model.pt")
    held = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(held) == {"model", "harmofl"}
    assert torch.equal(held["model"]["w"], torch.arange(3.0))
    assert json.loads(held["harmofl"]["experiment"])["name"] == "small"
    assert held["harmofl"]["amplitude_frozen"] is True


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(StateError, match="model.pt: no such checkpoint"):
        Checkpoint.load(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "held",
    [
        {"model": {}},
        {"model": {}, "harmofl": {"format": 99}},
        {"model": {}, "harmofl": "text"},
        [1, 2],
        {"model": {}, "harmofl": {"format": 1}},
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, held):
    torch.save(held, tmp_path / "model.pt")
    with pytest.raises(StateError, match="model.pt"):
        Checkpoint.load(tmp_path / "model.pt")


def test_a_damaged_checkpoint_is_refused(tmp_path):
    checkpoint().save(tmp_path / "model.pt")
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateError, match="model.pt cannot be read"):
        Checkpoint.load(tmp_path / "model.pt")


@pytest.mark.parametrize("part", ["model", "amplitude"])
def test_a_checkpoint_with_flipped_bytes_is_refused(tmp_path, part):
    large = torch.zeros(10_000)
    checkpoint(**{part: {"w": large} if part == "model" else large}).save(tmp_path / "model.pt")
    Checkpoint.load(tmp_path / "model.pt")
    flip(tmp_path / "model.pt")
    with pytest.raises(StateError, match="model.pt is damaged"):
        Checkpoint.load(tmp_path / "model.pt")
