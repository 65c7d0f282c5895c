"""What a method adds to the training loss against drift: FedProx's proximal term, MOON's contrast of models."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harmofl.core.training import LossTerm, autocast
from harmofl.experiment import TrainingSettings


def loss_terms(
    settings: TrainingSettings, network: nn.Module, previous: Mapping[str, np.ndarray] | None
) -> list[LossTerm]:
    """What the settings add to the loss of a round.

    Args:
        settings: with `proximal_mu`, `contrastive_weight` and `contrastive_temperature`.
        network: as received, on its device.
        previous: the site's local model after the round before; without one there is nothing to contrast with yet.
    """
    terms: list[LossTerm] = []
    if settings.proximal_mu > 0:
        terms.append(ProximalTerm(network, settings.proximal_mu))
    if settings.contrastive_weight > 0 and previous is not None:
        weight, temperature = settings.contrastive_weight, settings.contrastive_temperature
        cast = partial(autocast, next(network.parameters()).device, settings.precision)
        terms.append(ContrastiveTerm(network, previous, weight=weight, temperature=temperature, cast=cast))
    return terms


class ProximalTerm:
    """FedProx (Li et al., MLSys 2020, Eq 2): mu / 2 times the squared distance to the model that the round began with.

    Over all parameters, in float32; its gradient is mu (theta - theta_received), in both passes of a perturbed step.
    """

    def __init__(self, network: nn.Module, mu: float) -> None:
        """Take the present parameters as the anchor."""
        self._parameters = list(network.parameters())
        self._anchor = [parameter.detach().clone() for parameter in self._parameters]
        self._mu = mu

    def __call__(self, inputs: Tensor) -> Tensor:
        """The term, a float32 scalar; the batch does not matter."""
        pairs = zip(self._parameters, self._anchor, strict=True)
        distances = [(parameter - anchor).square().sum() for parameter, anchor in pairs]
        return self._mu / 2 * torch.stack(distances).sum()


class ContrastiveTerm:
    """MOON (Li, He, Song, CVPR 2021, Eq 3): features shall be near the received model's, far from the last local one's.

    With cosine similarities s of a batch's features to those of the received and of the site's previous local model,
    weight * mean(-log(exp(s_received / T) / (exp(s_received / T) + exp(s_previous / T)))). Features are what the last
    linear layer gets, a classifier's pooled features. Both models to compare with are in evaluation mode.
    """

    def __init__(
        self,
        network: nn.Module,
        previous: Mapping[str, np.ndarray],
        *,
        weight: float,
        temperature: float,
        cast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Take the present network as the received model.

        Args:
            network: the network in training, on its device; its features are noted from now on.
            previous: state of the site's local model after the round before.
            weight: mu of the paper.
            temperature: T above.
            cast: gives the autocast context of the training.

        Raises:
            ValueError: the network has no linear layer.
        """
        self._weight, self._temperature, self._cast = weight, temperature, cast
        self._received, self._previous = copy.deepcopy(network).eval(), copy.deepcopy(network).eval()
        own = self._previous.state_dict()
        self._previous.load_state_dict(
            {name: torch.as_tensor(np.asarray(previous[name])).reshape(own[name].shape) for name in own}
        )
        self._features: dict[str, Tensor] = {}
        for name, model in (("own", network), ("received", self._received), ("previous", self._previous)):
            self._note_features(name, model)

    def __call__(self, inputs: Tensor) -> Tensor:
        """The term for the batch that the network has just seen, a float32 scalar."""
        with torch.no_grad(), self._cast():
            self._received(inputs)
            self._previous(inputs)
        own = self._features["own"].float()
        similarities = [
            functional.cosine_similarity(own, self._features[name].float(), dim=1) / self._temperature
            for name in ("received", "previous")
        ]
        return self._weight * -functional.log_softmax(torch.stack(similarities), dim=0)[0].mean()

    def _note_features(self, name: str, model: nn.Module) -> None:
        def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            self._features[name] = given[0]

        classifier_of(model).register_forward_pre_hook(note)


def classifier_of(network: nn.Module) -> nn.Linear:
    """The last linear layer.

    Raises:
        ValueError: there is none.
    """
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("the network has no classifier, so MOON has no features to contrast")
    return linear[-1]
