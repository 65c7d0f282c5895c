"""A site's decoded images: one folder for the settings that decide them, and no more than a few."""

import os
from pathlib import Path
from typing import Any

import pytest

from harmofl.experiment import Experiment, set_key
from harmofl.flare.image_cache import KEPT, image_cache
from harmofl.tasks import resolve_experiment


def used(root: Path, experiment: Experiment, when: int) -> Path:
    """Use a cache as a job does, at a time of its own."""
    folder = image_cache(root, experiment)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.decoded").write_bytes(bytes(10))
    os.utime(folder, (when, when))
    return folder


def experiment_of(written: dict[str, Any], height: int = 64, **more: Any) -> Experiment:
    set_key(written, "data.height", height)
    for key, value in more.items():
        set_key(written, key.replace("__", "."), value)
    return resolve_experiment(written)


def test_jobs_of_many_sizes_leave_few_copies_of_all_images(written: dict[str, Any], tmp_path: Path) -> None:
    folders = [used(tmp_path, experiment_of(written, 64 + step), step) for step in range(10)]
    assert len(set(folders)) == 10
    # by hand: when the tenth settings were used the two newest others stayed
    assert KEPT == 3 and sorted(tmp_path.iterdir()) == sorted(folders[-KEPT:])


def test_the_settings_that_are_used_again_stay(written: dict[str, Any], tmp_path: Path) -> None:
    first = used(tmp_path, experiment_of(written), 0)
    for step in range(1, 8):
        used(tmp_path, experiment_of(written, 64 + step), 2 * step)
        assert used(tmp_path, experiment_of(written), 2 * step + 1) == first
    assert (first / "a.decoded").exists() and len(list(tmp_path.iterdir())) == KEPT
    os.utime(first, (0, 0))
    image_cache(tmp_path, experiment_of(written))
    assert first.stat().st_mtime > 100, "what is opened is used, although nothing is decoded"


@pytest.mark.parametrize("key", ["seed", "training__batch_size", "federation__rounds", "training__local_epochs"])
def test_settings_that_change_no_image_share_a_folder(written: dict[str, Any], tmp_path: Path, key: str) -> None:
    assert image_cache(tmp_path, experiment_of(written)) == image_cache(tmp_path, experiment_of(written, **{key: 5}))


def test_what_one_folder_held_before_goes_and_nothing_else(written: dict[str, Any], tmp_path: Path) -> None:
    for name in ("0a.decoded", "0b.hashed", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "kept").mkdir()
    (tmp_path / ("f" * 16)).symlink_to(tmp_path / "kept")
    for step in range(5):
        used(tmp_path, experiment_of(written, 64 + step), step)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"notes.txt", "kept", "f" * 16} <= left and not {"0a.decoded", "0b.hashed"} & left
