"""Files named as other programs name them: said which is which, and what to rename."""

from pathlib import Path

import pytest

from harmofl.data.findings import Finding
from harmofl.data.foreign_names import is_mask_beside_image, is_mask_folder, masked_case
from harmofl.data.layout import find_cases
from harmofl.data.nuclei import find_nuclei


def touched(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def said(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(finding.code, finding.subject, f"{finding.message}; {finding.fix}") for finding in findings]


@pytest.mark.parametrize(
    ("stem", "case"),
    [
        ("Case00-label", "Case00"),
        ("Case00_label", "Case00"),
        ("Case00_seg", "Case00"),
        ("Case00.seg", "Case00"),
        ("Case00_SEG", "Case00"),
        ("Case00_gt", "Case00"),
        ("Case00-mask", "Case00"),
        ("Case00-segmentation", "Case00"),
        ("Case00_ground_truth", "Case00"),
        ("sct_t2_seg_manual", "sct_t2"),
        ("mask_Case00", "Case00"),
        ("labels-7", "7"),
        ("Case00", None),
        ("TCGA-50-5931-01Z-00-DX1", None),
        ("mask", None),
        ("Case_lab", None),
        ("Casegt", None),
        ("pegmask", None),
    ],
)
def test_names_of_masks(stem: str, case: str | None) -> None:
    assert masked_case(stem) == case


def test_a_mask_lies_beside_its_image(tmp_path: Path) -> None:
    folder = touched(tmp_path, "Case00.nii.gz", "case00-label.nii.gz", "scan_roi.nii.gz", "a.png", "a_gt.tif")
    assert [name.name for name in sorted(folder.iterdir()) if is_mask_beside_image(name)] == [
        "a_gt.tif",
        "case00-label.nii.gz",
    ]


def test_names_of_folders_of_masks() -> None:
    for name in ("masks", "Labels", "labelsTr", "labelsTs", "GT", "GT_01", "ground_truth", "Binary_masks", "label 1"):
        assert is_mask_folder(name), name
    for name in ("images", "imagesTr", "Tissue Images", "Slide_01", "TCGA-A7", "gtex", "masked_tissue"):
        assert not is_mask_folder(name), name


@pytest.mark.parametrize("ending", ["-label", "_label", "_seg", "_mask", "_gt", "-Segmentation"])
def test_the_mask_of_a_volume_is_named_with_its_new_name(tmp_path: Path, ending: str) -> None:
    folder = touched(tmp_path, "Case00.nii.gz", f"Case00{ending}.nii.gz", "Case01.nii", f"case01{ending}.nii")
    cases, findings = find_cases(folder)
    assert cases == []
    assert said(findings) == [
        (
            "misnamed_mask",
            f"Case00{ending}.nii.gz",
            "looks like the mask of Case00; rename it to Case00_segmentation.nii.gz",
        ),
        ("misnamed_mask", f"case01{ending}.nii", "looks like the mask of Case01; rename it to Case01_segmentation.nii"),
    ]


def test_a_second_mask_and_a_mask_without_an_image(tmp_path: Path) -> None:
    folder = touched(
        tmp_path, "Case00.nii.gz", "Case00_segmentation.nii.gz", "Case00_seg.nii.gz", "Case01_label.nii.gz"
    )
    cases, findings = find_cases(folder)
    assert [case.name for case in cases] == ["Case00"]
    assert said(findings) == [
        (
            "misnamed_mask",
            "Case00_seg.nii.gz",
            "looks like another mask of Case00, which has one; take one of the two masks away",
        ),
        (
            "misnamed_mask",
            "Case01_label.nii.gz",
            "looks like a mask whose image Case01.nii.gz is not here; "
            "add the image and rename the mask to Case01_segmentation.nii.gz",
        ),
    ]


def test_an_image_with_a_masks_name_and_a_mask_of_its_own_is_a_case(tmp_path: Path) -> None:
    folder = touched(tmp_path, "Case00_seg.nii.gz", "Case00_seg_segmentation.nii.gz")
    cases, findings = find_cases(folder)
    assert [case.name for case in cases] == ["Case00_seg"] and findings == []


def test_files_of_nnunet_in_one_folder(tmp_path: Path) -> None:
    folder = touched(tmp_path, "Case00.nii.gz", "Case00_0000.nii.gz", "Case00_0001.nii.gz")
    touched(folder, "Case01_0000.nii.gz", "Case01_segmentation.nii.gz")
    assert said(find_cases(folder)[1]) == [
        (
            "misnamed_mask",
            "Case00.nii.gz",
            "looks like the mask of Case00, as nnU-Net names it beside its image Case00_0000.nii.gz; "
            "rename it to Case00_segmentation.nii.gz, then the image to Case00.nii.gz",
        ),
        (
            "misnamed_image",
            "Case00_0001.nii.gz",
            "looks like another sequence of Case00; keep one sequence of a case, take this away",
        ),
        (
            "misnamed_image",
            "Case01_0000.nii.gz",
            "looks like the image of Case01, as nnU-Net names it; rename it to Case01.nii.gz",
        ),
    ]


def test_numbers_of_four_digits_are_cases_where_nothing_says_otherwise(tmp_path: Path) -> None:
    folder = touched(tmp_path, *(f"Case_{n:04}{end}.nii.gz" for n in range(3) for end in ("", "_segmentation")))
    cases, findings = find_cases(folder)
    assert len(cases) == 3 and findings == []
    [finding] = find_cases(touched(folder, "Case_0003.nii.gz"))[1]
    assert (finding.code, finding.subject) == ("image_without_mask", "Case_0003.nii.gz")


@pytest.mark.parametrize("mask", ["Case00.mat", "Case00.npy", "Case00_seg.nrrd", "Case00.seg.nrrd", "Case00-label.mha"])
def test_masks_of_other_formats(tmp_path: Path, mask: str) -> None:
    findings = find_cases(touched(tmp_path, "Case00.nii.gz", mask, "Case00.json"))[1]
    # nothing beside it says to convert the mask to an image
    assert [finding.code for finding in findings] == ["misnamed_mask"]
    assert said(findings)[0][1:] == (
        mask,
        "looks like the mask of Case00; save it as Case00_segmentation.nii.gz, on the grid of the image",
    )


def test_the_image_in_another_format_too_is_not_called_its_mask(tmp_path: Path) -> None:
    findings = find_cases(touched(tmp_path, "Case00.nii.gz", "Case00.mha"))[1]
    assert [finding.code for finding in findings] == ["other_format", "image_without_mask"]


def test_volumes_in_folders_below_are_named(tmp_path: Path) -> None:
    folder = touched(tmp_path / "HK", *(f"Case{n:02}/t2/image.nii.gz" for n in range(6)), "notes/a.txt")
    [finding] = find_cases(folder)[1]
    assert (finding.severity, finding.code) == ("error", "no_cases")
    assert finding.message == (
        "the folder holds no NIfTI volume; volumes lie in folders below, which are not read "
        "(1 in Case00/t2, 1 in Case01/t2, 1 in Case02/t2, 1 in Case03/t2 and 2 more folders)"
    )
    touched(folder, "Case00.nii.gz", "Case00_segmentation.nii.gz")
    cases, [finding] = find_cases(folder)
    assert len(cases) == 1 and (finding.severity, finding.code) == ("warning", "nested_volumes")


def test_the_folders_of_nnunet_are_named(tmp_path: Path) -> None:
    folder = touched(tmp_path / "HK", "imagesTr/Case00_0000.nii.gz", "imagesTr/Case01_0000.nii.gz")
    touched(folder, "labelsTr/Case00.nii.gz", "dataset.json")
    [finding] = find_cases(folder)[1]
    assert "2 in imagesTr, 1 in labelsTr" in finding.message
    assert "copy imagesTr/CASE_0000.nii.gz to CASE.nii.gz and labelsTr/CASE.nii.gz to CASE_segm" in finding.fix


@pytest.mark.parametrize(
    ("image", "mask", "name"),
    [
        ("a.png", "a-label.png", "rename it to a_mask.png"),
        ("p/a.tif", "p/a_seg.png", "rename it to a_mask.png"),
        ("a.png", "a_GT.tif", "rename it to a_mask.tif"),
        ("a.png", "label_a.png", "rename it to a_mask.png"),
        ("images/a.png", "masks/a.png", "rename it to a_mask.png"),
        ("imagesTr/a_0000.png", "labelsTr/a.png", "rename it to a_0000_mask.png"),
        ("Images/a.png", "Labels/a.mat", "save it as a_mask.png, whole numbers without loss"),
        ("a.png", "a.npy", "save it as a_mask.png, whole numbers without loss"),
        ("a.png", "a_mask.jpg", "save it as a_mask.png, whole numbers without loss"),
    ],
)
def test_the_mask_of_a_picture_is_named_with_its_new_name(tmp_path: Path, image: str, mask: str, name: str) -> None:
    folder = touched(tmp_path, image, mask, "other/b.png", "other/b.xml")
    cases, findings = find_nuclei(folder)
    assert [case.name for case in cases] == ["b"]
    assert said(findings) == [("misnamed_mask", mask, f"looks like the mask of {Path(image).stem}; {name}")]
    renamed = Path(mask).with_name(name.split()[3].strip(","))
    (folder / mask).rename(folder / renamed)
    cases, findings = find_nuclei(folder)  # the advice is right
    assert sorted(case.name for case in cases) == sorted(["b", Path(image).stem]) and findings == []


def test_a_picture_with_an_annotation_needs_no_other_mask(tmp_path: Path) -> None:
    cases, findings = find_nuclei(touched(tmp_path, "a.png", "a_mask.png", "a_label.png", "a.mat"))
    assert [case.name for case in cases] == ["a"]
    assert [(finding.code, finding.subject) for finding in findings] == [
        ("misnamed_mask", "a_label.png"),
        ("other_format", "a.mat"),
    ]


def test_the_name_of_the_site_says_nothing(tmp_path: Path) -> None:
    [finding] = find_nuclei(touched(tmp_path / "lung_masks", "a.png"))[1]
    assert finding.code == "image_without_annotation"
    findings = find_nuclei(touched(tmp_path / "masks", "images/p/a.png", "masks/p/a.png"))[1]
    assert [finding.subject for finding in findings] == ["masks/p/a.png"]


def test_a_mask_that_may_be_of_several_pictures_is_given_to_none(tmp_path: Path) -> None:
    cases, findings = find_nuclei(touched(tmp_path, "p/a.png", "q/a.png", "masks/a.png"))
    assert cases == [] and {finding.code for finding in findings} == {"image_without_annotation"}


def test_the_missing_image_of_a_mask_is_named(tmp_path: Path) -> None:
    [finding] = find_nuclei(touched(tmp_path, "a_mask.png"))[1]
    assert finding.code == "annotation_without_image" and finding.fix.startswith("add a.tif or ")
