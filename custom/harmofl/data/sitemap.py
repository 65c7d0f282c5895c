"""Which patients of a shared collection belong to which site."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from harmofl.data.findings import DataRootError, Finding, count_text
from harmofl.data.layout import named_folder, site_folder
from harmofl.data.nuclei import NucleiCase, find_nuclei
from harmofl.sections import Section, first_problem, parse_json

FolderName = Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")]  # a name in the data root, no path out of it
Prefix = Annotated[str, Field(min_length=1)]


class SiteRule(Section):
    """What makes an image one of a site: the organ of its patient, the patient's name, or the folder it lies in."""

    organ: str | None = None
    patients: tuple[Prefix, ...] = ()
    folder: FolderName | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if sum(map(bool, (self.organ, self.patients, self.folder))) != 1:
            raise ValueError("a site has one of organ, patients and folder")
        return self


class SiteMap(Section):
    """Sites of a shared collection such as MoNuSAC.

    Attributes:
        sites: rule of each site.
        organs: organ of each patient, by name or prefix (whole parts of the name: TCGA-50, Slide_); of several
            prefixes the longest counts. Organs are not read off TCGA codes, which are no reliable guide to them.
    """

    sites: dict[str, SiteRule]
    organs: dict[Prefix, str] = {}

    def organ(self, patient: str) -> str | None:
        """Return the organ of a patient, None if the map does not say."""
        prefixes = [name for name in self.organs if _starts(patient, name)]
        return self.organs[max(prefixes, key=len)] if prefixes else None

    def claims(self, site: str, patient: str) -> bool:
        """Say whether the rule of a site takes in a patient; a folder takes in all that lies in it."""
        rule = self.sites[site]
        if rule.organ is not None:
            organ = self.organ(patient)
            return organ is not None and organ.casefold() == rule.organ.casefold()
        return rule.folder is not None or any(_starts(patient, prefix) for prefix in rule.patients)


def read_site_map(path: Path) -> SiteMap:
    """Read a map from JSON: ``{"sites": {"lung": {"organ": "lung"}, ...}, "organs": {"TCGA-55-1594": "lung", ...}}``.

    Raises:
        DataRootError: if it cannot be read or holds anything else; one line.
    """
    try:
        settings = parse_json(path.read_text(encoding="utf-8"))
        return SiteMap.model_validate_json(json.dumps(settings))  # JSON: a strict section takes no list for a tuple
    except ValidationError as error:
        raise DataRootError(f"site map {path}: {first_problem(error, SiteMap)}; correct the map") from None
    except (OSError, ValueError) as error:
        raise DataRootError(f"site map {path} cannot be read as JSON ({error}); correct the map or its path") from error


def nuclei_folder(root: Path, site: str, aliases: Sequence[str] = (), site_map: SiteMap | None = None) -> Path:
    """Return the folder that holds one site's images.

    The folder that the map names if it names one; else ``<root>/<site or alias>`` if it exists; else, with a map, the
    root, which holds the images of several sites; else the root if it holds images.

    Raises:
        DataRootError: if there is no such folder, or the map does not name the site.
    """
    rule = _rule(site_map, site)
    if rule and rule.folder:
        given = named_folder(root, [rule.folder])
        if given is None:
            raise DataRootError(f"the site map gives {site} the folder {root / rule.folder}, which does not exist")
        return given
    try:
        return site_folder(root, site, aliases)
    except DataRootError:
        if root.is_dir() and (rule or find_nuclei(root)[0]):
            return root
        if not root.is_dir():
            raise
        names = " or ".join(str(root / name) for name in [site, *aliases])
        raise DataRootError(
            f"no data for site {site}: neither the folder {names} exists, nor does {root} itself hold images of "
            "nuclei with annotations; put them there or correct HARMOFL_DATA_ROOT"
        ) from None


def site_cases(folder: Path, site: str, site_map: SiteMap | None = None) -> tuple[list[NucleiCase], list[Finding]]:
    """Return the cases of a folder that belong to a site, and what was found on the way.

    Without a map these are all. A patient claimed by several sites is used at none; what lies in a folder that the map
    gives to a site, or that has a site's name, is that site's alone.

    Raises:
        DataRootError: if a folder cannot be listed, or the map does not name the site.
    """
    cases, findings = find_nuclei(folder)
    rule = _rule(site_map, site)
    if site_map is None or rule is None or rule.folder:
        return cases, findings
    sharing = [name for name, other in site_map.sites.items() if not other.folder]
    given = {(other.folder or name).casefold() for name, other in site_map.sites.items()}
    cases = [case for case in cases if case.image.relative_to(folder).parts[0].casefold() not in given]
    kept = []
    for case in cases:
        claims = [name for name in sharing if site_map.claims(name, case.patient)]
        if claims == [site]:
            kept.append(case)
        elif site in claims:
            message = f"the site map gives this patient to {' and '.join(claims)}"
            findings.append(Finding("error", "several_sites", case.name, message, "correct the map"))
    unclaimed = {case.patient for case in cases if not any(site_map.claims(name, case.patient) for name in sharing)}
    without = sorted(patient for patient in unclaimed if rule.organ and site_map.organ(patient) is None)
    if without:
        message = f"the site map has no organ for {count_text(len(without), 'patient')}, whose images are not used"
        findings.append(Finding("warning", "no_organ", ", ".join(without[:5]), message, "add them to organs"))
    if not kept:
        message = f"of {count_text(len(cases), 'image')} none belongs to {site}"
        findings.append(Finding("error", "no_cases", folder.name, message, "correct the site map or the folder"))
    return kept, findings


def _rule(site_map: SiteMap | None, site: str) -> SiteRule | None:
    if site_map is None:
        return None
    if site not in site_map.sites:
        raise DataRootError(f"the site map names {', '.join(site_map.sites)}, not {site}; add the site to the map")
    return site_map.sites[site]


def _starts(patient: str, prefix: str) -> bool:
    """Say whether a name begins with a prefix that ends where a part of the name does, so that 1 is no prefix of 10."""
    name, start = patient.casefold(), prefix.casefold()
    rest = name[len(start) :]
    return name.startswith(start) and not (start[-1].isalnum() and rest[:1].isalnum())
