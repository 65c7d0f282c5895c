"""RoundStart: what a site's round of training begins with, in each process that takes part in it."""

from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.loss_terms import loss_terms
from harmofl.core.parallel import ProcessGroup
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import Loss, RoundResult, RoundSettings, build_optimizer, fit_round
from harmofl.experiment import Experiment
from harmofl.flare.progress import FINDINGS
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.wire import Arrays


@dataclass(frozen=True)
class RoundStart:
    """What a round of training begins with, beside the site's data and settings.

    Attributes:
        network: as received, with the site's own layers, on its device.
        normalization: on the same device.
        optimizer: around the network's parameters, with the moments of the round before.
        previous: MOON's: state of this site's model after the round before.
        seed: of this round.
    """

    network: nn.Module
    normalization: AmplitudeNormalization
    optimizer: WeightPerturbation
    previous: Arrays | None
    seed: int

    def fit(
        self,
        experiment: Experiment,
        settings: RoundSettings,
        loss: Loss,
        dataset: "Dataset[Any]",
        *,
        should_stop: Callable[[], bool],
        group: ProcessGroup,
    ) -> RoundResult:
        """Train the network in place for one round; see `fit_round`."""
        return fit_round(
            self.network,
            self.normalization,
            self.optimizer,
            loss,
            dataset,
            settings=settings,
            seed=self.seed,
            should_stop=should_stop,
            terms=loss_terms(experiment.training, self.network, self.previous),
            group=group,
        )

    def packed(self) -> bytes:
        """All of it as bytes, which need no shared memory on their way to another process."""
        previous = self.previous
        held = {
            "network": self.network.state_dict(),
            "normalization": self.normalization.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "previous": previous and {name: torch.as_tensor(value) for name, value in previous.items()},
            "seed": self.seed,
        }
        stream = BytesIO()
        torch.save(held, stream)
        return stream.getvalue()

    @classmethod
    def unpacked(
        cls, packed: bytes, network: nn.Module, normalization: AmplitudeNormalization, optimizer: WeightPerturbation
    ) -> "RoundStart":
        """The reverse of `packed`, in a network, normalization and optimizer of this process."""
        held = torch.load(BytesIO(packed), map_location="cpu", weights_only=True)
        network.load_state_dict(held["network"])
        normalization.load_state_dict(held["normalization"])
        optimizer.load_state_dict(held["optimizer"])
        previous = held["previous"]
        return cls(
            network,
            normalization,
            optimizer,
            previous and {name: value.numpy() for name, value in previous.items()},
            held["seed"],
        )


def round_settings(experiment: Experiment, workers: int, compiled: bool) -> RoundSettings:
    """An experiment's settings for one round, with a site's number of loader processes and its choice to compile."""
    given = experiment.training
    return RoundSettings(
        batch_size=given.batch_size,
        epochs=given.local_epochs,
        augmentation=given.augmentation,
        clip_norm=given.clip_norm,
        precision=given.precision,
        workers=workers,
        compile=compiled,
    )


def round_optimizer(experiment: Experiment, network: nn.Module) -> WeightPerturbation:
    """An experiment's optimizer, without moments yet, around a network's parameters."""
    given = experiment.training
    inner = build_optimizer(network, given.optimizer, given.learning_rate, given.momentum, given.weight_decay)
    return WeightPerturbation(inner, experiment.perturbation.alpha, network)


def failed_to_compile(error: Exception, site: SiteConfig) -> SiteError | None:
    """What to say in place of an error of torch.compile, which goes to the site's findings; None for any other."""
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException | AssertionError):  # compiled code asserts its tensors' forms
        return None
    FINDINGS.warning(f"{site.name}: {error}")
    kind = type(getattr(error, "inner_exception", error)).__name__
    fix = "install a C++ compiler there or set compile to false in local/privacy.json"
    return SiteError("compile", f"site {site.name}: torch.compile failed ({kind}); {fix}")
