"""The map from sites to patients, and the folder of a site."""

import json
from pathlib import Path
from typing import Any

import pytest

from harmofl.data.findings import DataRootError
from harmofl.data.sitemap import SiteMap, nuclei_folder, read_site_map, site_cases

SITES: dict[str, Any] = {
    "lung": {"organ": "lung"},
    "breast": {"organ": "Breast"},
    "monuseg": {"patients": ["TCGA-B0", "TCGA-NH-A8F7"]},
    "tnbc": {"folder": "TNBC"},
}
ORGANS = {"TCGA-55-1594": "lung", "TCGA-A2": "breast", "TCGA-A2-A04X": "lung"}


def site_map(**changes: Any) -> SiteMap:
    return SiteMap.model_validate_json(json.dumps({"sites": SITES, "organs": ORGANS, **changes}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One folder of several sites."""
    patients = (
        "TCGA-55-1594",
        "TCGA-A2-A04X",
        "TCGA-A2-A0ET",
        "TCGA-B0-5710",
        "TCGA-B01-571",
        "TCGA-NH-A8F7",
        "TCGA-ZZ-0001",
    )
    for patient in patients:
        for ending in ("tif", "xml"):
            path = tmp_path / "all" / f"{patient}-01Z" / f"{patient}-01Z_1.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for path in (tmp_path / "all/TNBC/Slide_01/01_1.png", tmp_path / "all/TNBC/GT_01/01_1.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "all"


def patients(root: Path, site: str, sites: SiteMap | None) -> list[str]:
    cases, _ = site_cases(nuclei_folder(root, site, (), sites), site, sites)
    return [case.patient for case in cases]


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        ("lung", ["TCGA-55-1594", "TCGA-A2-A04X"]),  # the longest prefix counts
        ("breast", ["TCGA-A2-A0ET"]),
        ("monuseg", ["TCGA-B0-5710", "TCGA-NH-A8F7"]),  # not TCGA-B01
        ("tnbc", ["Slide_01"]),
    ],
)
def test_each_site_gets_its_patients(root: Path, site: str, expected: list[str]) -> None:
    assert patients(root, site, site_map()) == expected


def test_patients_of_no_organ_are_named(root: Path) -> None:
    _, findings = site_cases(root, "lung", site_map())
    [finding] = [finding for finding in findings if finding.code == "no_organ"]
    assert "TCGA-ZZ-0001" in finding.subject
    assert "TCGA-55-1594" not in finding.subject


def test_a_patient_of_two_sites_is_used_at_none(root: Path) -> None:
    sites = site_map(sites={**SITES, "other": {"patients": ["TCGA-55-"]}})
    for site in ("lung", "other"):
        cases, findings = site_cases(root, site, sites)
        assert "TCGA-55-1594" not in {case.patient for case in cases}
        [finding] = [finding for finding in findings if finding.code == "several_sites"]
        assert "lung and other" in finding.message
    assert "no_cases" in {finding.code for finding in findings}  # nothing else belongs to the other


def test_a_site_that_the_map_does_not_name(root: Path) -> None:
    for call in (lambda: nuclei_folder(root, "liver", (), site_map()), lambda: site_cases(root, "liver", site_map())):
        with pytest.raises(DataRootError, match="not liver"):
            call()


def test_a_folder_a_site_needs_no_map(root: Path) -> None:
    assert nuclei_folder(root, "tnbc") == root / "TNBC"
    assert nuclei_folder(root, "F", ["TNBC"]) == root / "TNBC"
    assert nuclei_folder(root, "lung") == root  # it holds images itself
    cases, findings = site_cases(root / "TNBC", "tnbc")
    assert [case.name for case in cases] == ["01_1"]
    assert findings == []


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataRootError, match="neither the folder .*lung or .*A exists"):
        nuclei_folder(tmp_path, "lung", ["A"])
    with pytest.raises(DataRootError, match="not a folder"):
        nuclei_folder(tmp_path / "none", "lung")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "sm.json"),
        ('{"organs": {}}', "sites: is missing"),
        ('{"sites": {"lung": {}}}', "sites.lung: a site has one of organ, patients and folder"),
        ('{"sites": {"lung": {"organ": "lung", "folder": "x"}}}', "one of organ, patients and folder"),
        ('{"sites": {"lung": {"organs": "lung"}}}', "sites.lung.organs: unknown setting"),
        ('{"sites": {"lung": {"folder": "../other"}}}', "sites.lung.folder"),
        ('{"sites": {"lung": {"folder": "/data"}}}', "sites.lung.folder"),
        ('{"sites": {"lung": {"folder": ".."}}}', "sites.lung.folder"),
        ('{"sites": {"lung": {"patients": [""]}}}', "sites.lung.patients.0"),
    ],
)
def test_a_map_that_cannot_be_used_is_answered_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "sm.json"
    path.write_text(text)
    with pytest.raises(DataRootError) as caught:
        read_site_map(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_map_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sm.json"
    path.write_text(json.dumps({"sites": SITES, "organs": ORGANS}))
    assert read_site_map(path) == site_map()
    with pytest.raises(DataRootError, match="cannot be read"):
        read_site_map(tmp_path / "none.json")


def test_what_lies_in_a_folder_that_the_map_gives_away_is_that_sites_alone(root: Path) -> None:
    sites = site_map(
        sites={"lung": {"organ": "lung"}, "kept": {"folder": "TCGA-55-1594-01Z"}, "tnbc": {"folder": "TNBC"}}
    )
    assert patients(root, "kept", sites) == ["TCGA-55-1594"]
    assert patients(root, "lung", sites) == ["TCGA-A2-A04X"]
    _, findings = site_cases(root, "lung", sites)
    [finding] = [finding for finding in findings if finding.code == "no_organ"]
    assert "Slide_01" not in finding.subject  # used by tnbc


def test_what_lies_in_a_folder_with_a_sites_name_is_that_sites_alone(root: Path) -> None:
    (root / "TCGA-55-1594-01Z").rename(root / "Kidney")  # a folder of the site's own, whatever the organ table says
    sites = site_map(sites={"lung": {"organ": "lung"}, "kidney": {"organ": "kidney"}})
    assert "TCGA-55-1594" not in patients(root, "lung", sites)
