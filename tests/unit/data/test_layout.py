import os
from pathlib import Path

import pytest

from harmofl.data.findings import DataRootError, Finding
from harmofl.data.layout import find_cases, site_folder


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def pair(*names: str) -> list[str]:
    return [file for name in names for file in (f"{name}.nii.gz", f"{name}_segmentation.nii.gz")]


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def test_b12_any_letter_case_and_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, "Case100.nii.gz", "Case100_Segmentation.nii.gz", "case9.nii", "CASE9_SEGMENTATION.NII")
    touch(tmp_path, "patient-x.nii.gz", "patient-x_segmentation.nii")
    cases, findings = find_cases(tmp_path)
    assert findings == []
    assert [case.name for case in cases] == ["case9", "Case100", "patient-x"]
    assert cases[0].mask == tmp_path / "CASE9_SEGMENTATION.NII"
    assert cases[1].mask == tmp_path / "Case100_Segmentation.nii.gz"


def test_b12_a_large_mask_is_still_a_mask(tmp_path: Path) -> None:
    touch(tmp_path, *pair("Case00"))
    (tmp_path / "Case00_segmentation.nii.gz").write_bytes(bytes(2**20 + 1))  # released loader: an image, as > 1 MiB
    cases, _ = find_cases(tmp_path)
    assert [(case.image.name, case.mask.name) for case in cases] == [tuple(pair("Case00"))]


def test_b11_hidden_and_junk_files_are_no_cases(tmp_path: Path) -> None:
    touch(tmp_path, *pair("Case00"), "._Case00.nii.gz", "._Case00_segmentation.nii.gz", ".DS_Store", "Thumbs.db")
    touch(tmp_path, "__MACOSX/._Case01.nii.gz", "README.txt")
    cases, findings = find_cases(tmp_path)
    assert [case.name for case in cases] == ["Case00"]
    assert findings == []


@pytest.mark.parametrize(
    ("files", "code", "named"),
    [
        (["Case01.nii.gz"], "image_without_mask", ["Case01.nii.gz"]),
        (["Case01_segmentation.nii.gz"], "mask_without_image", ["Case01_segmentation.nii.gz"]),
        ([*pair("Case01"), "Case01.nii"], "duplicate_case", ["Case01.nii.gz", "Case01.nii"]),
        ([*pair("Case01"), "case01_Segmentation.nii"], "duplicate_case", ["case01_Segmentation.nii"]),
    ],
)
def test_b12_orphans_and_duplicates_are_named_and_left_out(
    tmp_path: Path, files: list[str], code: str, named: list[str]
) -> None:
    touch(tmp_path, *pair("Case00"), *files)
    cases, findings = find_cases(tmp_path)
    assert [case.name for case in cases] == ["Case00"]
    assert codes(findings) == [code]
    assert findings[0].severity == "error"
    assert all(name in findings[0].subject for name in named)
    assert findings[0].fix


def test_other_formats_are_counted_once_each(tmp_path: Path) -> None:
    touch(tmp_path, *pair("Case00"), "a.mha", "b.MHA", "c.mgz")
    _, findings = find_cases(tmp_path)
    assert [(finding.subject, finding.message.split()[0]) for finding in findings] == [("*.mha", "2"), ("*.mgz", "1")]
    assert set(codes(findings)) == {"other_format"}


def test_a_link_to_nowhere_is_still_a_case(tmp_path: Path) -> None:
    touch(tmp_path, "Case00_segmentation.nii.gz")
    (tmp_path / "Case00.nii.gz").symlink_to(tmp_path / "gone.nii.gz")
    assert [case.name for case in find_cases(tmp_path)[0]] == ["Case00"]  # reading it says that the file is missing


def test_empty_folder_is_an_error_not_an_empty_list(tmp_path: Path) -> None:
    [finding] = find_cases(tmp_path)[1]
    assert (finding.code, finding.message) == ("no_cases", "the folder holds no NIfTI volume")
    assert finding.fix == "put CaseNN.nii.gz and CaseNN_segmentation.nii.gz of each case into it"


def test_folder_that_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(DataRootError, match="cannot be listed"):
        find_cases(tmp_path / "absent")


def test_site_folder_prefers_exact_spelling_then_any(tmp_path: Path) -> None:
    touch(tmp_path / "hk", *pair("Case38"))
    assert site_folder(tmp_path, "HK") == tmp_path / "hk"
    touch(tmp_path / "HK", *pair("Case38"))
    assert site_folder(tmp_path, "HK") == tmp_path / "HK"


def test_site_folder_by_alias(tmp_path: Path) -> None:
    touch(tmp_path / "ISBI_1.5", *pair("Case00"))
    assert site_folder(tmp_path, "BMC", ["ISBI_1.5"]) == tmp_path / "ISBI_1.5"


def test_root_itself_holds_the_cases(tmp_path: Path) -> None:
    touch(tmp_path, *pair("Case00"))
    assert site_folder(tmp_path, "HK") == tmp_path


def test_no_folder_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(DataRootError) as caught:
        site_folder(tmp_path, "HK", ["Bergen"])
    message = str(caught.value)
    assert all(part in message for part in (str(tmp_path / "HK"), str(tmp_path / "Bergen"), f"does {tmp_path} itself"))
    assert "\n" not in message


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(DataRootError, match="HARMOFL_DATA_ROOT"):
        site_folder(tmp_path / "absent", "HK")


@pytest.mark.parametrize("place", ["HK", "HK/series", ".", "series"])
@pytest.mark.parametrize("name", ["1-01.dcm", "IM0001"])
def test_dicom_is_answered_with_the_conversion(tmp_path: Path, place: str, name: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bytes(128) + b"DICM" + bytes(16))
    with pytest.raises(DataRootError) as caught:
        site_folder(tmp_path, "HK")
    assert "DICOM" in str(caught.value)
    assert "dcm2niix -z y" in str(caught.value)
    assert "CaseNN_segmentation.nii.gz" in str(caught.value)


def test_a_folder_or_pipe_with_a_volumes_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "Case01.nii.gz").mkdir()
    os.mkfifo(tmp_path / "Case02.nii.gz")
    _, findings = find_cases(tmp_path)
    found = {finding.subject: finding for finding in findings if finding.code == "not_a_file"}
    assert set(found) == {"Case01.nii.gz", "Case02.nii.gz"}
    assert "a folder" in found["Case01.nii.gz"].message and "no regular file" in found["Case02.nii.gz"].message
