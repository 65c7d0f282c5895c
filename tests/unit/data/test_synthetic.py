"""The synthetic sites: real files in the real layout, deterministic, and different from scanner to scanner."""

import nibabel as nib
import numpy as np
import pytest

from harmofl.data.layout import find_cases
from harmofl.data.pairs import read_pair
from harmofl.data.scanners import SCANNERS
from harmofl.data.synthetic import simulate_case, write_prostate_site

SMALL = {"matrix": 64, "slices": 8}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def voxels(folder):
    return {path.name: np.asanyarray(nib.load(path).dataobj) for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Four cases of every scanner, as read by the package: {scanner: [ImagePair]}."""
    root = tmp_path_factory.mktemp("sites")
    pairs = {}
    for scanner in SCANNERS:
        write_prostate_site(root / scanner, scanner, 4, 0, **SMALL)
        cases, findings = find_cases(root / scanner)
        assert [case.name for case in cases] == ["Case00", "Case01", "Case02", "Case03"] and not findings
        pairs[scanner] = [read_pair(case) for case in cases]
    return root, pairs


def test_a_case_depends_on_scanner_seed_and_number_alone(tmp_path):
    write_prostate_site(tmp_path / "many", "ge_3t_endorectal", 3, 5, **SMALL)
    write_prostate_site(tmp_path / "last", "ge_3t_endorectal", 1, 5, first_case=2, **SMALL)
    write_prostate_site(tmp_path / "again", "ge_3t_endorectal", 3, 5, **SMALL)
    write_prostate_site(tmp_path / "other", "ge_3t_endorectal", 3, 6, **SMALL)
    many, last, again, other = (voxels(tmp_path / name) for name in ("many", "last", "again", "other"))
    assert all(np.array_equal(many[name], last[name]) for name in last) and len(last) == 2
    assert all(np.array_equal(many[name], again[name]) for name in many)
    assert not any(np.array_equal(many[name], other[name]) for name in many)


def test_image_and_mask_share_a_grid_and_every_orientation_is_brought_to_one(sites):
    root, pairs = sites
    codes = set()
    for scanner, read in pairs.items():
        for pair in read:
            assert pair.image.shape == pair.mask.shape == (8, 64, 64)
            assert pair.spacing[0] > 2 * pair.spacing[1]  # thick slices
        stored = nib.load(next((root / scanner).glob("Case00.nii.gz")))
        codes.add("".join(nib.aff2axcodes(stored.affine)))
        assert stored.get_data_dtype() in (np.int16, np.uint16)
    assert len(codes) > 1


def test_masks_have_the_labels_and_names_of_the_real_collection(sites):
    root, pairs = sites
    zonal = {scanner for scanner, read in pairs.items() if read[0].labels == (1, 2)}
    assert zonal == {scanner for scanner, profile in SCANNERS.items() if profile.zones} and len(zonal) == 2
    capital = {scanner for scanner in SCANNERS if list((root / scanner).glob("*_Segmentation.nii.gz"))}
    assert len(capital) == 1


def test_glands_are_within_the_priors_and_end_within_the_volume(sites):
    _, pairs = sites
    # PI-CAI whole-gland masks: median 49-53 mL, 5th percentile 23, 95th 132; 24 patients stay within twice that range
    volumes = [np.count_nonzero(pair.mask) * np.prod(pair.spacing) / 1000 for read in pairs.values() for pair in read]
    assert 30 < np.median(volumes) < 80
    assert min(volumes) > 11 and max(volumes) < 264
    foreground = [pair.mask.any(axis=(1, 2)).sum() for read in pairs.values() for pair in read]
    assert min(foreground) >= 2
    assert sum(count < 8 for count in foreground) >= 6, "large glands fill the slab, others leave end slices empty"


def test_the_gland_is_brightest_without_a_coil_and_darkest_at_the_mixed_site(monkeypatch):
    """The order in the published figure of the six sites: gland over the 99th percentile of the rest."""
    monkeypatch.setattr("harmofl.data.synthetic.PEDESTAL", 0.0)  # the figure's display has no slice-wise intercept
    levels = {}
    for scanner, profile in SCANNERS.items():
        ratios = []
        for number in range(8):
            voxels, labels = simulate_case(profile, np.random.default_rng([0, number]), 64, 12)
            ratios.append(voxels[labels > 0].mean() / np.percentile(voxels[labels == 0], 99))
        levels[scanner] = np.mean(ratios)
    order = sorted(levels, key=levels.get)
    assert order[0] == "siemens_mixed" and order[-1] == "siemens_3t_no_coil"
    # 0.11-0.19 and 0.66-0.87 in the figure
    assert levels[order[0]] < 0.3 and levels[order[-1]] > 0.45


def test_brightness_varies_from_slice_to_slice(sites):
    """What a window over the volume keeps and a z-score of the image removes."""
    _, pairs = sites
    spreads = [np.std(pair.image.mean(axis=(1, 2))) / pair.image.mean() for read in pairs.values() for pair in read]
    assert np.median(spreads) > 0.2


def test_an_interrupted_write_leaves_no_site(tmp_path, monkeypatch):
    saved = []

    def fail_at_third(image, path):
        saved.append(path)
        if len(saved) == 3:
            raise OSError("disk full")
        return original(image, path)

    original = nib.save
    monkeypatch.setattr(nib, "save", fail_at_third)
    with pytest.raises(OSError, match="disk full"):
        write_prostate_site(tmp_path / "site", "siemens_mixed", 3, 0, **SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_site_is_kept_and_other_files_are_not_overwritten(tmp_path):
    write_prostate_site(tmp_path / "site", "siemens_mixed", 2, 0, **SMALL)
    before = contents(tmp_path / "site")
    write_prostate_site(tmp_path / "site", "siemens_mixed", 2, 0, **SMALL)
    assert contents(tmp_path / "site") == before
    with pytest.raises(FileExistsError, match="already holds other files"):
        write_prostate_site(tmp_path / "site", "siemens_mixed", 3, 0, **SMALL)


def test_an_unknown_scanner_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="choose one of siemens_3t_surface"):
        write_prostate_site(tmp_path / "site", "toshiba", 1, 0)
