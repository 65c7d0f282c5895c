"""FedProx's and MOON's terms against their equations, in both passes of a perturbed step."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from toy_segmentation import BATCH, cross_entropy, dataset, equal, network, normalization, settings
from toy_training import batch
from toy_training import network as classifier

from harmofl.core.loss_terms import ContrastiveTerm, ProximalTerm, classifier_of, loss_terms
from harmofl.core.networks import build_network
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import build_optimizer, fit_round, state_arrays
from harmofl.experiment import TrainingSettings


def training(**changes):
    return TrainingSettings(optimizer="sgd", learning_rate=0.05, batch_size=BATCH, **changes)


def trained(terms_of, alpha=0.0):
    model = network()
    optimizer = WeightPerturbation(build_optimizer(model, "sgd", 0.05, 0.9, 0.0), alpha, model)
    result = fit_round(
        model,
        normalization(),
        optimizer,
        cross_entropy,
        dataset(),
        settings=settings(),
        seed=1,
        terms=terms_of(model),
    )
    return model, result


def far(model: nn.Module, by: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def test_nothing_asked_for_adds_nothing():
    assert loss_terms(training(), classifier(), None) == []
    assert loss_terms(training(contrastive_weight=1.0), classifier(), None) == [], "no local model yet"


@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_c11_fedprox_with_mu_0_is_fedavg_bit_for_bit(alpha):
    plain, first = trained(lambda model: (), alpha)
    proximal, second = trained(lambda model: [ProximalTerm(model, 0.0)], alpha)
    assert equal(plain, proximal) and first == second


def test_the_term_is_half_mu_times_the_squared_distance_to_the_model_received():
    model = classifier()
    term = ProximalTerm(model, 0.3)
    assert float(term(batch(0)[0]).detach()) == 0.0
    far(model, 0.5)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    value = term(batch(0)[0])
    assert float(value.detach()) == pytest.approx(0.3 / 2 * parameters * 0.25)
    value.backward()
    for parameter in model.parameters():
        # mu (theta - theta_received)
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 0.3 * 0.5))


def test_the_proximal_gradient_is_in_both_passes_of_a_perturbed_step():
    """One SGD step of rate 1 by hand, from the gradient at the perturbed weights, with the term in both gradients."""
    alpha, mu = 0.1, 0.7
    model = classifier()
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    far(model, 0.05)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, labels = batch(1)

    def gradient(at):
        for parameter, value in zip(model.parameters(), at, strict=True):
            parameter.data.copy_(value)
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        pairs = zip(model.parameters(), at, anchor, strict=True)
        return [parameter.grad + mu * (value - held) for parameter, value, held in pairs]

    first = gradient(start)
    norm = torch.sqrt(sum(part.square().sum() for part in first))
    second = gradient([value + alpha * part / norm for value, part in zip(start, first, strict=True)])
    expected = [value - part for value, part in zip(start, second, strict=True)]

    for parameter, value in zip(model.parameters(), anchor, strict=True):
        parameter.data.copy_(value)
    term = ProximalTerm(model, mu)
    for parameter, value in zip(model.parameters(), start, strict=True):
        parameter.data.copy_(value)
    optimizer = WeightPerturbation(torch.optim.SGD(model.parameters(), lr=1.0), alpha, model)
    optimizer.step(lambda: nn.functional.cross_entropy(model(inputs), labels) + term(inputs))
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-5, atol=1e-6)


def distance(model: nn.Module) -> float:
    return float(sum((a - b).square().sum() for a, b in zip(model.parameters(), network().parameters(), strict=True)))


def test_a_larger_mu_keeps_a_round_nearer_to_the_model_received():
    distances = [
        distance(trained(lambda model, mu=mu: loss_terms(training(proximal_mu=mu), model, None))[0])
        for mu in (0.0, 1.0, 5.0)
    ]
    assert distances[0] > distances[1] > distances[2] > 0


def moon_by_hand(own, received, previous, temperature):
    """Li, He, Song 2021, Eq 3, one image at a time in float64."""
    losses = []
    for z, z_received, z_previous in zip(own, received, previous, strict=True):
        near = np.exp(z @ z_received / np.linalg.norm(z) / np.linalg.norm(z_received) / temperature)
        apart = np.exp(z @ z_previous / np.linalg.norm(z) / np.linalg.norm(z_previous) / temperature)
        losses.append(-np.log(near / (near + apart)))
    return np.mean(losses)


def features(model: nn.Module, inputs: torch.Tensor) -> np.ndarray:
    """What the toy classifier's last layer gets."""
    return model[:2](inputs).detach().double().numpy()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_moon_is_its_equation(temperature):
    model, other = classifier(0), classifier(1)
    received = copy.deepcopy(model)
    term = ContrastiveTerm(model, state_arrays(other), weight=3.0, temperature=temperature, cast=nullcontext)
    far(model, 0.2)
    inputs, _ = batch(2)
    model(inputs)
    expected = 3.0 * moon_by_hand(*(features(one, inputs) for one in (model, received, other)), temperature)
    assert float(term(inputs)) == pytest.approx(expected, rel=1e-5)


def test_moon_s_gradient_moves_features_towards_the_model_received():
    model, other = classifier(0), classifier(1)
    received = copy.deepcopy(model)
    term = ContrastiveTerm(model, state_arrays(other), weight=1.0, temperature=0.5, cast=nullcontext)
    far(model, 0.3)
    inputs, _ = batch(3)

    def nearness() -> float:
        pair = torch.tensor(features(model, inputs)), torch.tensor(features(received, inputs))
        return float(torch.cosine_similarity(*pair).mean())

    before, optimizer = nearness(), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        model(inputs)
        term(inputs).backward()
        optimizer.step()
    assert nearness() > before


def test_moon_s_references_stay_as_they_are_and_count_no_batch():
    model = build_network("densenet121", 3, (0.5, 0.5), width=4, norm="batch", seed=0)
    previous = state_arrays(build_network("densenet121", 3, (0.5, 0.5), width=4, norm="batch", seed=1))
    term = ContrastiveTerm(model, previous, weight=1.0, temperature=0.5, cast=nullcontext)
    held = [state_arrays(reference) for reference in (term._received, term._previous)]
    inputs = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model.train()
    model(inputs)
    value = term(inputs)
    value.backward()
    assert torch.isfinite(value)
    assert term._features["own"].shape == (2, classifier_of(model).in_features)
    for reference, before in zip((term._received, term._previous), held, strict=True):
        after = state_arrays(reference)
        assert all(np.array_equal(after[name], before[name]) for name in before)
        assert not any(parameter.grad is not None for parameter in reference.parameters())
    assert all(np.array_equal(held[1][name], previous[name]) for name in previous)
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_a_network_without_a_classifier_is_refused():
    with pytest.raises(ValueError, match="no classifier"):
        classifier_of(nn.Conv2d(3, 2, 1))


def test_the_loss_that_is_told_holds_the_terms():
    """A term that adds 2 to every loss, and nothing to a gradient."""
    (_, plain), (_, raised) = trained(lambda model: ()), trained(lambda model: [lambda inputs: torch.tensor(2.0)])
    assert raised.loss == pytest.approx(plain.loss + 2.0, rel=1e-6)
