"""Federated minus local-only: pairs, intervals over patients by hand, runs that must not be compared."""

import pytest

from harmofl.evidence.paired import compare_with_local
from harmofl.evidence.results import Results, ResultsError


def local_of(results: Results, **scores: list[float | None]) -> Results:
    """The same run, local-only, with other scores by case."""
    local = results.model_copy(deep=True, update={"method": "local_only"})
    for site, cases in scores.items():
        defined = [case for case in cases if case is not None]
        local.sites[site].test["dice"].per_case = cases
        local.sites[site].test["dice"].mean = sum(defined) / len(defined) if defined else None
    return local


def test_differences_are_made_case_by_case(results):
    # federated 0.75, 0.5 and 0.6; local-only 0.65, 0.3 and 0.3: differences 0.1, 0.2 and 0.3
    results.sites["HEALTHY"].test["dice"].per_case = [0.75, 0.5, 0.6]
    comparison = compare_with_local(results, local_of(results, HEALTHY=[0.65, 0.3, 0.3]))
    (site,) = comparison.sites
    assert (site.name, site.units, site.compared, site.why) == ("HEALTHY", 3, "3 cases", "")
    assert (site.federated, site.local, site.mean) == (0.625, pytest.approx(1.25 / 3), pytest.approx(0.2))
    # error 0.1 / sqrt(3) = 0.057735, t(0.975, 2) = 4.302653: half 0.248414
    assert (site.low, site.high) == (pytest.approx(-0.048414, abs=1e-6), pytest.approx(0.448414, abs=1e-6))
    assert comparison.better == 1 and comparison.without == ("EMPTY", "SILENT")
    over = comparison.over_sites
    assert over is not None and (over.mean, over.low, over.units) == (pytest.approx(0.2), None, 1)
    assert over.why == "too few for an interval"


def test_cases_of_one_patient_are_one_unit(results):
    # six cases of three patients, whose differences are 0.1, 0.2 and 0.3: the interval is that of these three
    local = local_of(results, HEALTHY=[0.5, 0.4, 0.4, 0.5, 0.3, 0.3])
    for run in (results, local):
        run.sites["HEALTHY"].test["dice"].patient_of_case = [0, 0, 1, 1, 2, 2]
    results.sites["HEALTHY"].test["dice"].per_case = [0.6, 0.5, 0.6, 0.7, 0.6, 0.6]
    (site,) = compare_with_local(results, local).sites
    assert (site.compared, site.units) == ("6 cases", 3)
    assert (site.low, site.high) == (pytest.approx(-0.048414, abs=1e-6), pytest.approx(0.448414, abs=1e-6))


def test_a_patient_with_more_cases_has_more_part_in_the_difference(results):
    # the two scores beside it are means over cases, so their difference is too: (0.1 + 0.2 + 0.5 + 0.0) / 4, where
    # the mean over the three patients would be (0.15 + 0.5 + 0) / 3
    local = local_of(results, HEALTHY=[0.5, 0.5, 0.25, 0.5])
    for run in (results, local):
        run.sites["HEALTHY"].test["dice"].patient_of_case = [0, 0, 1, 2]
    results.sites["HEALTHY"].test["dice"].per_case = [0.6, 0.7, 0.75, 0.5]
    (site,) = compare_with_local(results, local).sites
    assert site.mean == pytest.approx(0.2)


def test_the_interval_over_sites_takes_sites_for_units(results):
    healthy = results.sites["HEALTHY"]
    for name in ("EMPTY", "SILENT"):
        results.sites[name] = healthy.model_copy(deep=True)
    local = local_of(results, HEALTHY=[0.75, 0.5], EMPTY=[0.65, 0.4], SILENT=[0.55, 0.3])
    over = compare_with_local(results, local).over_sites
    assert over is not None and (over.compared, over.units) == ("3 sites", 3)
    # differences of the sites 0, 0.1 and 0.2
    assert (over.low, over.high) == (pytest.approx(-0.148414, abs=1e-6), pytest.approx(0.348414, abs=1e-6))


def test_two_patients_give_a_difference_without_interval(results):
    (site,) = compare_with_local(results, local_of(results, HEALTHY=[0.65, 0.2])).sites
    assert (site.mean, site.low, site.high) == (pytest.approx(0.2), None, None)
    assert (site.units, site.why) == (2, "too few for an interval")


def test_a_case_without_a_score_is_no_pair(results):
    results.sites["HEALTHY"].test["dice"].per_case = [0.75, None, 0.5]
    comparison = compare_with_local(results, local_of(results, HEALTHY=[0.5, 0.5, None]))
    (site,) = comparison.sites
    assert (site.units, site.compared, site.mean, site.low) == (1, "1 cases", 0.25, None)


def shares_of(results: Results, parts: list[tuple[int, int]]) -> None:
    score = results.sites["HEALTHY"].test["dice"]
    score.per_case, score.by_patient, score.patients = [], parts, len(parts)
    score.n = sum(of for _, of in parts)
    score.mean = sum(right for right, _ in parts) / score.n


def test_a_share_is_compared_patient_by_patient(results):
    # 100 patches a patient: 80, 90, 85 right against 80, 80, 65: differences 0, 0.1 and 0.2
    local = local_of(results)
    shares_of(results, [(80, 100), (90, 100), (85, 100)])
    shares_of(local, [(80, 100), (80, 100), (65, 100)])
    (site,) = compare_with_local(results, local).sites
    assert (site.mean, site.units, site.compared) == (pytest.approx(0.1), 3, "300 images")
    assert (site.low, site.high) == (pytest.approx(-0.148414, abs=1e-6), pytest.approx(0.348414, abs=1e-6))


def test_a_score_that_is_not_known_by_patient_has_no_interval(results):
    local = local_of(results)
    for run, mean in ((results, 0.8), (local, 0.6)):
        shares_of(run, [(8, 10)])
        held = run.sites["HEALTHY"].test["dice"]
        held.by_patient, held.mean, held.low, held.high, held.patients = [], mean, mean - 0.1, mean + 0.1, 7
    (site,) = compare_with_local(results, local).sites
    assert (site.mean, site.low, site.units) == (pytest.approx(0.2), None, 7)
    assert (site.why, site.compared) == ("not known by patient", "10 cases or images")


def test_patches_or_patients_of_others_are_refused(results):
    local = local_of(results)
    shares_of(results, [(80, 100), (90, 100)])
    shares_of(local, [(80, 100), (90, 101)])
    with pytest.raises(ResultsError, match="HEALTHY tested 200 images in one run and 201 others in the other"):
        compare_with_local(results, local)
    local = local_of(results, HEALTHY=[0.5, 0.5])
    results.sites["HEALTHY"].test["dice"].per_case = [0.5, 0.5]
    results.sites["HEALTHY"].test["dice"].patient_of_case = [0, 0]
    with pytest.raises(ResultsError, match="HEALTHY tested cases of other patients"):
        compare_with_local(results, local)


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"method": "fedavg"}, "method is fedavg, not local_only"),
        ({"demo": False}, "one run is a demo"),
        ({"task": "nuclei"}, "differ in task"),
        ({"seed": 1}, "differ in seed"),
        ({"data": {"height": 96}}, "differ in data"),
    ],
)
def test_runs_that_tested_other_cases_are_refused_in_one_line(results, changed, part):
    local = local_of(results, HEALTHY=[0.5, 0.5])
    for key, value in changed.items():
        if key in ("method", "demo"):
            local = local.model_copy(update={key: value})
        else:
            local.experiment[key] = value
    with pytest.raises(ResultsError, match=f"--local-only: .*{part}") as caught:
        compare_with_local(results, local)
    assert "\n" not in str(caught.value)


def test_where_data_lies_does_not_decide_which_cases_are_tested(results):
    local = local_of(results, HEALTHY=[0.5, 0.5])
    local.experiment["data"] = results.experiment["data"] | {"simulated_root": "/elsewhere", "aliases": {"A": ["B"]}}
    assert compare_with_local(results, local).sites


def test_another_number_of_cases_is_refused_with_the_sites_name(results):
    with pytest.raises(ResultsError, match="site HEALTHY tested 2 cases in one run and 1 in the other"):
        compare_with_local(results, local_of(results, HEALTHY=[0.5]))


def test_a_local_run_is_compared_with_nothing(results):
    local = local_of(results)
    with pytest.raises(ResultsError, match="the run itself is local_only too"):
        compare_with_local(local, local)
