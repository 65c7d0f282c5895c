"""Amplitudes that come with weights: averaged by sites or images, refused together with their weights."""

import math

import numpy as np
import pytest
from toy_answers import difference, refused, statistic

from harmofl.core.gaussian_mechanism import calibrate_sigma
from harmofl.evidence.results import NoiseStatement
from harmofl.flare.aggregator import AmplitudeGathering
from harmofl.flare.wire import AmplitudeStatistic

PUBLISHED = {"amplitude.preset": "as_published"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a13_an_amplitude_that_is_not_finite_is_refused_with_its_weights(healthy, answer, bad):
    aggregator, run, context = healthy(PUBLISHED)
    sent = answer("B", difference(9.0), amplitude=statistic(run, bad))
    assert "amplitude" in refused(aggregator, run, context, sent)
    gathered = aggregator.gathered_amplitude()
    assert gathered is None or gathered.sites == []


@pytest.mark.parametrize(("average", "expected"), [("sites", 3.0), ("images", 2.5)])
def test_amplitudes_that_come_along_are_averaged(opened, answer, average, expected):
    # by sites (2 + 4) / 2; by images (15 * 2 + 5 * 4) / 20
    aggregator, run, context = opened(PUBLISHED | {"amplitude.average": average})
    for site, value, images in (("A", 2.0, 15), ("B", 4.0, 5)):
        assert aggregator.accept(answer(site, difference(), amplitude=statistic(run, value, images)), context)
    assert aggregator.accept(answer("C", difference()), context)  # a site may refuse to send its amplitude
    gathered = aggregator.gathered_amplitude()
    assert gathered is not None
    assert gathered.sites == ["A", "B"]
    result = gathered.result()
    assert (set(result.values.ravel().tolist()), result.images) == ({expected}, 20)
    assert len(aggregator.accepted) == 3


def test_an_amplitude_of_another_shape_is_refused_with_its_weights(healthy, answer):
    aggregator, run, context = healthy(PUBLISHED)
    wrong = AmplitudeStatistic(np.ones(7, np.float32), 5, patients=5)
    assert "shape" in refused(aggregator, run, context, answer("B", difference(9.0), amplitude=wrong))


@pytest.mark.parametrize("changes", [{}, {"method": "fedavg"}])
def test_an_amplitude_that_nobody_asked_for_is_not_kept(opened, answer, changes):
    # robust gathers its amplitude before training; FedAvg has none
    aggregator, run, context = opened(changes)
    sent = answer("A", difference(), amplitude=AmplitudeStatistic(np.ones(7, np.float32), 5, patients=5))
    assert aggregator.accept(sent, context)
    assert aggregator.gathered_amplitude() is None


def test_after_the_freeze_no_amplitude_is_gathered(opened, answer):
    aggregator, run, context = opened(PUBLISHED)
    run.amplitude = statistic(run, 1.0)
    assert aggregator.accept(answer("A", difference(), amplitude=statistic(run, 5.0)), context)
    assert aggregator.gathered_amplitude() is None


@pytest.mark.parametrize("order", [("A", "B", "C"), ("C", "A", "B")])
def test_the_global_amplitude_does_not_depend_on_the_order(make_run, order):
    run = make_run()
    generator = np.random.default_rng(0)
    shape = statistic(run).values.shape
    sent = {site: generator.standard_normal(shape).astype(np.float32) for site in run.expected}
    gathering = AmplitudeGathering(run.experiment)
    for site in order:
        gathering.add(site, AmplitudeStatistic(sent[site], 5))
    # the sum of three float32 in float64 has 29 bits to spare
    expected = (sum(sent[site].astype(np.float64) for site in run.expected) / 3).astype(np.float32)
    assert gathering.result().values.tolist() == expected.tolist()


def test_what_sites_say_about_their_noise_is_gathered(opened, answer):
    aggregator, run, context = opened(PUBLISHED)
    sigma = calibrate_sigma(1, 1e-5, 2 * 5 / 5)  # moves of at most 5, opposite ones, of 5 patients
    noise = NoiseStatement(mechanism="analytic_gaussian", epsilon=1, delta=1e-5, clip=5, patients=5, sigma=sigma)
    assert aggregator.accept(answer("A", difference(), amplitude=statistic(run)), context)
    assert aggregator.accept(answer("B", difference(), amplitude=statistic(run, noise=noise)), context)
    gathered = aggregator.gathered_amplitude()
    assert gathered.sites == ["A", "B"] and gathered.noise == {"B": noise} and gathered.patients == {"A": 5, "B": 5}


def test_an_amplitude_that_still_waits_for_its_noise_is_refused(healthy, answer):
    aggregator, run, context = healthy(PUBLISHED)
    sent = answer("B", difference(9.0), amplitude=statistic(run, clip=5.0, relative_clip=0.8))
    assert "list harmofl.flare.filters.AmplitudeFilter" in refused(aggregator, run, context, sent)
