"""What a hospital may say in the properties of its privacy scope, and what it is told where it cannot be used."""

from typing import Any

import pytest

from harmofl.flare.site import SiteError, own_setting, site_settings
from harmofl.flare.site_settings import LimitSettings, SettingsError, read_site_settings, setting_problems


def test_nothing_said_means_the_defaults_of_a_careful_hospital() -> None:
    settings = read_site_settings({})
    assert settings.minimum_cases == 5 and settings.device == "auto" and settings.limits == LimitSettings()


@pytest.mark.parametrize(
    ("scope", "line"),
    [
        ({"minimum_case": 9}, "local/privacy.json: unknown property minimum_case; did you mean 'minimum_cases'?"),
        ({"limit": {}}, "local/privacy.json: unknown property limit; did you mean 'limits'?"),
        ({"limits": {"minimum_site": 2}}, "limits.minimum_site: unknown setting; did you mean 'minimum_sites'?"),
        ({"limits": {"minimum_sites": 0}}, "limits.minimum_sites: Input should be greater than or equal to 1, not 0"),
        ({"limits": {"minimum_sites": "2"}}, "limits.minimum_sites: Input should be a valid integer"),
        ({"limits": {"case_scores": 1}}, "limits.case_scores: Input should be a valid boolean, not 1"),
        ({"limits": {"regions": ["all"]}}, "limits.regions.0: Input should be 'dc', 'low', 'full' or 'site_gain'"),
        ({"limits": 3}, "limits must hold minimum_sites, "),
        ({"limits": None}, "limits: Input should be a valid dictionary"),
        ({"approval": "on"}, "approval: Input should be 'off' or 'required'"),
        ({"patient_pattern": "("}, "patient_pattern: is no regular expression"),
        ({"folder": "../UCL"}, "folder: String should match pattern"),
        ({"workers": None}, "workers in local/privacy.json must be a whole number of 0 or more"),
        ({"data_root": {"path": "/Jane"}}, "data_root in local/privacy.json must be text, an absolute path"),
        ({"allowed_names": "dice"}, "allowed_names in local/privacy.json must be a list of names of scores"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_in_one_line(scope: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_site_settings(scope)
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "scope",
    [{"folder": "../Jane"}, {"limits": {"regions": ["Jane"]}}, {"limits": {"rounds": "Jane"}}, {"device": "Jane"}],
)
def test_the_line_does_not_tell_a_text_that_somebody_wrote(scope: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as caught:
        read_site_settings(scope)
    assert "Jane" not in str(caught.value), "the line leaves the site"


def test_every_problem_is_found_and_one_setting_is_read_beside_them() -> None:
    scope = {"minimum_cases": 0, "devise": "cpu", "limits": {"rounds": 0}, "threads": 2}
    assert [problem.name for problem in setting_problems(scope)] == ["site_settings", "minimum_cases", "limits"]
    assert own_setting(scope, "threads") == 2 and own_setting(scope, "workers") is None
    with pytest.raises(SiteError) as caught:
        site_settings(scope)
    assert caught.value.code == "site_settings"
