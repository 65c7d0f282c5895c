import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harmofl.data import decoded, volumes
from harmofl.data.findings import CaseError, DataRootError
from harmofl.data.layout import Case
from harmofl.data.volumes import VolumeCache, VolumeSettings, read_site, read_volume

NATIVE = VolumeSettings(height=16, width=20, upper_percentile=99.0)
RAW = VolumeSettings(height=16, width=20, upper_percentile=None)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Sizes and times of everything below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


def decoding_is_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    original = volumes.read_pair

    def counted(case: Case) -> object:
        names.append(case.name)
        return original(case)

    monkeypatch.setattr(volumes, "read_pair", counted)
    return names


def test_window_runs_from_minimum_to_percentile(write_case, gland) -> None:
    image = gland[0].astype(np.float64).transpose(2, 1, 0)
    high = np.quantile(image, 0.99)
    expected = np.clip((image - image.min()) / (high - image.min()), 0, 1)
    volume = read_volume(write_case(), NATIVE)
    assert volume.image.dtype == np.float16
    assert volume.image.shape == (6, 16, 20)
    np.testing.assert_allclose(volume.image, expected, atol=2.0**-11)  # half a step of float16 below 1
    np.testing.assert_array_equal(volume.mask, gland[1].transpose(2, 1, 0))
    assert volume.mask.dtype == np.uint8
    np.testing.assert_allclose(volume.spacing, (3.0, 0.5, 0.5), rtol=1e-6)


def test_raw_intensities_stay_float32(write_case, gland) -> None:
    volume = read_volume(write_case(), RAW)
    assert volume.image.dtype == np.float32
    np.testing.assert_array_equal(volume.image, gland[0].transpose(2, 1, 0))


def test_half_size_is_the_mean_of_two_by_two(write_case, gland) -> None:
    volume = read_volume(write_case(), VolumeSettings(height=8, width=10, upper_percentile=None))
    # a pixel center of the half grid lies in the middle of four native centers: bilinear gives their mean
    image = gland[0].transpose(2, 1, 0).astype(np.float64)
    expected = image.reshape(6, 8, 2, 10, 2).mean(axis=(2, 4))
    np.testing.assert_allclose(volume.image, expected, rtol=1e-6)
    np.testing.assert_allclose(volume.spacing, (3.0, 1.0, 1.0), rtol=1e-6)


def test_b6_another_size_keeps_slices_and_extent(write_case) -> None:
    volume = read_volume(write_case(), VolumeSettings(height=24, width=15, upper_percentile=99.0))
    assert volume.image.shape == volume.mask.shape == (6, 24, 15)
    # 16 rows of 0.5 mm on 24 rows, 20 columns of 0.5 mm on 15 columns
    np.testing.assert_allclose(volume.spacing, (3.0, 8 / 24, 10 / 15), rtol=1e-6)
    assert set(np.unique(volume.mask)) == {0, 1}


@pytest.mark.parametrize("size", [30, 43, 64, 91, 128])
def test_mask_stays_on_the_image_through_a_resize(write_case, size: int) -> None:
    x, y = np.meshgrid(np.arange(64), np.arange(64), indexing="ij")
    disc = ((x - 30.0) ** 2 + (y - 35.0) ** 2 < 14**2)[:, :, None].repeat(3, axis=2)
    case = write_case(image=disc.astype(np.float32), mask=disc.astype(np.uint8))
    volume = read_volume(case, VolumeSettings(height=size, width=size, upper_percentile=None))

    def center(weights: np.ndarray) -> np.ndarray:
        grid = np.indices(weights.shape).reshape(3, -1)
        return (grid * weights.reshape(-1)).sum(axis=1) / weights.sum()

    # torch's plain nearest would be off by up to half a pixel
    np.testing.assert_allclose(center(volume.mask), center(volume.image.astype(np.float64)), atol=0.15)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.float32, np.float64])
def test_b9_full_range_types_neither_wrap_nor_overflow(write_case, gland, dtype: type) -> None:
    low, high = (-1e30, 1e30) if np.issubdtype(dtype, np.floating) else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    ramp = np.linspace(low, high, gland[0].size).reshape(gland[0].shape).astype(dtype)
    image = read_volume(write_case(image=ramp), NATIVE).image.transpose(2, 1, 0).reshape(-1)
    assert image[0] == 0
    assert image[-1] == 1
    assert (np.diff(image.astype(np.float32)) >= 0).all()


@pytest.mark.parametrize("bright", [1, 10])
def test_b9_a_bright_spot_in_darkness_divides_by_no_zero(write_case, gland, bright: int) -> None:
    image = np.zeros(gland[0].shape, np.float32)
    image.reshape(-1)[:bright] = 500.0  # 10 of 1920 voxels: over 99 % are 0
    volume = read_volume(write_case(image=image), NATIVE)
    blank = ["blank_slices"] if bright == 1 else []  # the spot lies in the first of 20 slices: 10 voxels are half a row
    assert [finding.code for finding in volume.findings] == ["sparse_image", *blank]
    np.testing.assert_array_equal(np.unique(volume.image), [0, 1])
    assert np.count_nonzero(volume.image) == bright


def test_cache_answers_as_decoding_does_and_decodes_once(write_case, tmp_path: Path, monkeypatch) -> None:
    names = decoding_is_counted(monkeypatch)
    case = write_case(mask=np.zeros((20, 16, 6), np.uint8))
    first = VolumeCache(tmp_path / "cache").read(case, NATIVE)
    second = VolumeCache(tmp_path / "cache").read(case, NATIVE)
    assert names == ["Case00"]
    for volume in (first, second):
        fresh = read_volume(case, NATIVE)
        np.testing.assert_array_equal(volume.image, fresh.image)
        np.testing.assert_array_equal(volume.mask, fresh.mask)
        assert volume.image.dtype == fresh.image.dtype
        assert (volume.name, volume.spacing, volume.findings) == (fresh.name, fresh.spacing, fresh.findings)
    assert [finding.code for finding in second.findings] == ["empty_mask"]


def test_cache_follows_content_settings_and_the_version_of_the_pipeline(write_case, tmp_path, monkeypatch) -> None:
    names, case, cache = decoding_is_counted(monkeypatch), write_case(), VolumeCache(tmp_path / "cache")

    def decodes(settings: VolumeSettings = NATIVE) -> bool:
        names.clear()
        cache.read(case, settings)
        return bool(names)

    assert decodes() and not decodes() and decodes(RAW)
    os.utime(case.image)
    assert not decodes(), "the content is the same"
    write_case(mask=np.ones((20, 16, 6), np.uint8))
    assert decodes() and cache.read(case, NATIVE).mask.all()
    write_case()
    assert not decodes() and not cache.read(case, NATIVE).mask.all()
    monkeypatch.setattr(volumes, "PIPELINE_VERSION", volumes.PIPELINE_VERSION + 1)
    assert decodes()


@pytest.mark.parametrize("damage", ["empty", "half", "bit", "foreign", "directory"])
def test_damaged_entry_is_rebuilt(write_case, tmp_path: Path, monkeypatch, damage: str) -> None:
    case, cache = write_case(), VolumeCache(tmp_path / "cache")
    intact = cache.read(case, NATIVE)
    (entry,) = (tmp_path / "cache").glob("*.decoded")
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1  # inside the image, which fills most of the entry
    spoiled = {"empty": b"", "half": content[: len(content) // 2], "bit": content, "foreign": decoded.MARK + b"nothing"}
    entry.unlink()
    if damage == "directory":
        entry.mkdir()
    else:
        entry.write_bytes(spoiled[damage])
    names = decoding_is_counted(monkeypatch)
    np.testing.assert_array_equal(cache.read(case, NATIVE).image, intact.image)
    cache.read(case, NATIVE)
    assert names == ["Case00"] * (2 if damage == "directory" else 1)  # a directory cannot be replaced by a file


def test_entry_is_whole_or_absent_when_writing_stops(write_case, tmp_path: Path, monkeypatch) -> None:
    def stops(stream: object, decoded: object) -> None:
        stream.write(b"half an entry")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    cache = VolumeCache(tmp_path / "cache")
    monkeypatch.setattr(decoded, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        cache.read(write_case(), NATIVE)
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_cannot_be_written_is_a_warning(write_case, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    volume = VolumeCache(tmp_path / "cache").read(write_case(), NATIVE)
    assert [finding.code for finding in volume.findings] == ["cache_not_written"]


def test_entries_are_for_the_owner_only(write_case, tmp_path: Path) -> None:
    VolumeCache(tmp_path / "cache").read(write_case(), NATIVE)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert all(entry.stat().st_mode & 0o077 == 0 for entry in (tmp_path / "cache").iterdir())


def test_refused_case_is_not_decoded_again(write_case, tmp_path: Path, monkeypatch) -> None:
    names = decoding_is_counted(monkeypatch)
    case = write_case(image=np.zeros((20, 16, 6), np.int16))
    for _ in range(2):
        with pytest.raises(CaseError) as caught:
            VolumeCache(tmp_path / "cache").read(case, NATIVE)
        assert caught.value.finding.code == "constant_image"
    assert names == ["Case00"]


def test_cache_never_lies_in_the_data_folder(write_case) -> None:
    case = write_case()
    with pytest.raises(DataRootError, match="never written to"):
        VolumeCache(case.image.parent / "cache").read(case, NATIVE)


def test_b17_bad_cases_become_findings_and_the_rest_is_read(write_case, tmp_path: Path) -> None:
    cases = [write_case(f"Case{number:02d}") for number in range(5)]
    cases[1].image.write_bytes(b"")
    cases[2].mask.write_bytes(cases[2].mask.read_bytes()[:80])
    cases[3].mask.unlink()
    before = tree(tmp_path / "site")
    for cache in (None, VolumeCache(tmp_path / "cache"), VolumeCache(tmp_path / "cache")):
        read, findings = read_site(cases, NATIVE, cache)
        assert [volume.name for volume in read] == ["Case00", "Case04"]
        assert [(finding.code, finding.subject) for finding in findings] == [
            ("empty_file", "Case01.nii.gz"),
            ("damaged_file", "Case02_segmentation.nii.gz"),
            ("missing_file", "Case03_segmentation.nii.gz"),
        ]
    assert tree(tmp_path / "site") == before


def test_a_process_with_a_warm_cache_does_not_import_monai(write_case, tmp_path: Path) -> None:
    case = write_case()
    VolumeCache(tmp_path / "cache").read(case, NATIVE)
    script = f"""
import sys
from pathlib import Path
from harmofl.data.layout import find_cases
from harmofl.data.volumes import VolumeCache, VolumeSettings, read_site
from harmofl.data.windows import SliceWindows
cases, _ = find_cases(Path({str(case.image.parent)!r}))
volumes, _ = read_site(cases, VolumeSettings(16, 20, 99.0), VolumeCache(Path({str(tmp_path / "cache")!r})))
assert len(SliceWindows(volumes)) == 3
print(sorted(name for name in ("monai", "nibabel", "skimage") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
