"""Patches are decoded when asked for; bad ones are replaced, named and counted up to a limit."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from harmofl.data import patches
from harmofl.data.findings import DataRootError
from harmofl.data.patch_index import PatchIndex
from harmofl.data.patches import Patches, UnreadablePatchesError
from tests.wilds import write_site


@pytest.fixture
def site(tmp_path: Path) -> PatchIndex:
    return write_site(tmp_path, 20)


def opened(site: PatchIndex, bad_share: float = 0.1) -> Patches:
    return Patches(site, np.arange(len(site)), 6, 8, bad_share)


def rows_seen(images: torch.Tensor) -> list[int]:
    return (images[:, 0, 0, 0] * 255).round().int().tolist()


def path_of(site: PatchIndex, number: int) -> Path:
    return site.folder / site.name(number)


class TestPatches:
    def test_an_item_is_an_image_in_0_to_1_and_its_label(self, site):
        image, label = opened(site)[3]
        assert image.shape == (3, 6, 8)
        assert image.dtype == torch.float32
        assert torch.equal(image[:, 0, 0], torch.tensor([3 / 255, 0, 1]))
        assert (label.dtype, label.shape, label.item()) == (torch.int64, (), 1)

    def test_only_the_given_rows_in_their_order(self, site):
        dataset = Patches(site, np.array([7, 2, 9]), 6, 8)
        assert rows_seen(torch.stack([image for image, _ in dataset])) == [7, 2, 9]
        assert dataset.labels.tolist() == [1, 0, 1]
        assert len(Patches(site, np.array([], np.int64), 6, 8)) == 0

    def test_a_copy_in_another_process_reads_on(self, site):
        copy = pickle.loads(pickle.dumps(opened(site)))
        assert rows_seen(copy[5][0][None]) == [5]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_bad_patches_are_replaced_by_the_next_of_their_label_marked_and_named(self, site, workers):
        path_of(site, 4).unlink()
        path_of(site, 19).write_bytes(path_of(site, 19).read_bytes()[:60])
        dataset = opened(site)
        for _ in range(2):  # workers of the second pass are new processes
            batches = list(DataLoader(dataset, 5, num_workers=workers))
            # 4 is normal, the next normal is 6; 19 is the last tumor, in a circle the next is 1
            expected = [0, 1, 2, 3, 6, *range(5, 19), 1]
            assert [number for images, _ in batches for number in rows_seen(images)] == expected
            assert torch.cat([labels for _, labels in batches]).tolist() == [0, 1] * 10
        assert dataset.bad().tolist() == [4, 19]
        assert dataset.skipped() == {"missing_image": 1, "unreadable_image": 1}
        subjects = {finding.code: finding.subject for finding in dataset.findings()}
        assert subjects == {"missing_image": site.name(4), "unreadable_image": site.name(19)}

    @pytest.mark.parametrize("workers", [0, 1])  # torch waits 5 s for each worker of a loader that failed
    def test_beyond_the_limit_the_job_fails_in_one_line(self, site, workers):
        for number in (3, 8, 11):  # 10 % of 20 is 2
            path_of(site, number).unlink()
        with pytest.raises(DataRootError) as caught:
            list(DataLoader(opened(site), 5, num_workers=workers))
        assert type(caught.value) is UnreadablePatchesError
        message = str(caught.value)
        assert message.startswith("3 of 20 patches cannot be read, 10 % may; the last was patches/patient_00")
        assert "\n" not in message

    def test_the_limit_is_rounded_up_and_0_allows_none(self, site):
        path_of(site, 3).unlink()
        assert rows_seen(opened(site, 0.01)[3][0][None]) == [5]
        with pytest.raises(UnreadablePatchesError, match=r"1 of 20 patches cannot be read, 0 % may"):
            opened(site, 0)[3]

    def test_no_patch_of_a_label_is_left(self, site):
        for number in range(0, 20, 2):
            path_of(site, number).unlink()
        with pytest.raises(UnreadablePatchesError, match=r"no normal patch can be read \(10 of 20 are bad\)"):
            opened(site, 1.0)[4]

    def test_another_size_is_refused_by_name_never_resized(self, site):
        Image.new("RGB", (6, 8)).save(path_of(site, 2))
        dataset = opened(site)
        assert rows_seen(dataset[2][0][None]) == [4]
        (finding,) = dataset.findings()
        assert (finding.code, finding.subject) == ("patch_size", site.name(2))
        assert "6 x 8 instead of 8 x 6 pixels" in finding.message

    def test_a_patch_that_comes_back_stays_marked_and_counted(self, site):
        content = path_of(site, 2).read_bytes()
        path_of(site, 2).unlink()
        dataset = opened(site)
        dataset[2]
        path_of(site, 2).write_bytes(content)
        assert rows_seen(dataset[2][0][None]) == [4]
        assert dataset.skipped() == {"unreadable_image": 1}

    def test_findings_of_one_kind_are_told_together(self, site):
        for number in range(0, 12, 2):
            path_of(site, number).unlink()
        dataset = opened(site, 0.5)
        dataset.check(0)
        (finding,) = dataset.findings()
        assert finding.message.startswith("6 patches; the first: ")
        assert finding.subject.count(".png") == 3
        assert finding.subject.endswith(" and 3 more")


class TestCheck:
    def test_conversions_are_noted_once(self, site):
        for number in (5, 6):
            Image.new("L", (8, 6), 7).save(path_of(site, number))
        (notice,) = opened(site).check(0)
        assert (notice.severity, notice.code) == ("notice", "converted_image")
        assert notice.message.startswith("2 patches; the first: gray")

    def test_a_small_folder_is_read_whole(self, site):
        for number in (0, 19):
            path_of(site, number).unlink()
        dataset = opened(site)
        assert dataset.check(0) == []
        assert dataset.bad().tolist() == [0, 19]

    def test_a_sample_far_beyond_the_limit_fails_before_training(self, tmp_path, monkeypatch):
        """Of 10 patches at 5 %, 4 * 0.05 * 10 = 2 may be bad by chance, 3 may not; all 200 may have 10 bad."""
        monkeypatch.setattr(patches, "SAMPLE", 10)
        site = write_site(tmp_path, 200)
        (tmp_path / "patches").rename(tmp_path / "away")
        dataset = opened(site, 0.05)
        with pytest.raises(UnreadablePatchesError, match=r"3 patches of a sample of 10 cannot be read, 5 % may"):
            dataset.check(0)
        (tmp_path / "away").rename(tmp_path / "patches")
        drawn = dataset.bad().tolist()
        assert len(drawn) == 3
        for number in drawn[:2]:
            path_of(site, number).unlink()
        dataset = opened(site, 0.05)
        dataset.check(0)
        assert dataset.bad().tolist() == drawn[:2]
