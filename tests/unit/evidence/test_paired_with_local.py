"""Federated minus local-only: pairs, intervals by hand, runs that must not be compared."""

import pytest

from harmofl.evidence.paired import compare_with_local, mean_with_interval
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
    # federated 0.75 and 0.5; local-only 0.65 and 0.2: differences 0.1 and 0.3
    comparison = compare_with_local(results, local_of(results, HEALTHY=[0.65, 0.2]))
    (site,) = comparison.sites
    assert (site.name, site.n, site.paired) == ("HEALTHY", 2, True)
    assert (site.federated, site.local, site.mean) == (0.625, pytest.approx(0.425), pytest.approx(0.2))
    # t(0.975, 1) = 12.7062, standard error 0.1: 0.2 -+ 1.27062, cut to [-1, 1]
    assert (site.low, site.high) == (-1.0, 1.0)
    assert comparison.better == 1 and comparison.without == ("EMPTY", "SILENT")
    over = comparison.over_sites
    assert over is not None and (over.mean, over.low, over.n) == (pytest.approx(0.2), None, 1)


def test_the_interval_is_students():
    # mean 0.1, standard deviation 0.1, error 0.1 / sqrt(3) = 0.057735, t(0.975, 2) = 4.302653: half 0.248414
    assert mean_with_interval([0.0, 0.1, 0.2]) == (
        pytest.approx(0.1),
        pytest.approx(-0.148414, abs=1e-6),
        pytest.approx(0.348414, abs=1e-6),
    )
    assert mean_with_interval([0.5]) == (0.5, None, None)


def test_a_case_without_a_score_is_no_pair(results):
    results.sites["HEALTHY"].test["dice"].per_case = [0.75, None, 0.5]
    comparison = compare_with_local(results, local_of(results, HEALTHY=[0.5, 0.5, None]))
    (site,) = comparison.sites
    assert (site.n, site.mean, site.low) == (1, 0.25, None)


def test_scores_over_all_images_get_newcombes_interval(results):
    local = local_of(results)
    for run, mean, low, high in ((results, 0.8, 0.7, 0.88), (local, 0.6, 0.5, 0.7)):
        score = run.sites["HEALTHY"].test["dice"]
        score.per_case, score.mean, score.low, score.high = [], mean, low, high
    (site,) = compare_with_local(results, local).sites
    # below: sqrt(0.1^2 + 0.1^2) = 0.141421; above: sqrt(0.08^2 + 0.1^2) = 0.128062
    assert not site.paired
    assert (site.low, site.high) == (pytest.approx(0.2 - 0.141421, abs=1e-6), pytest.approx(0.2 + 0.128062, abs=1e-6))


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
