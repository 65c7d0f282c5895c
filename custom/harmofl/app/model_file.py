"""A model file as something that predicts: network, frozen amplitude and the experiment that made them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from harmofl.app.job import JobError
from harmofl.core.amplitude import AmplitudeNormalization, RunningAmplitude
from harmofl.core.contrast import has_contrast
from harmofl.core.deployed import DeployedModel, DeployedNormalization
from harmofl.core.layout import placed
from harmofl.core.partition import partition_of
from harmofl.core.training import finite_logits
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.local_amplitude import build_normalization
from harmofl.flare.state import Checkpoint, StateError
from harmofl.sections import ExperimentError, first_problem, one_line
from harmofl.tasks import TASKS, Predict, Task, is_outside, load_task, untrained_network
from harmofl.tasks.single_images import SingleImage, image_use

SHOWN = 3  # names of entries in a message


class ModelFileError(JobError):
    """A model file that cannot be used; one line with the file and the fix."""


@dataclass(frozen=True)
class LoadedModel:
    """A model file, ready to predict.

    Attributes:
        path: the file.
        network: in evaluation mode, on `device`.
        normalization: as training defined it, with the global amplitude frozen; for `site_gain` it has no own profile.
        experiment: that trained it.
        task: of that experiment.
        checkpoint: everything else that the file holds.
        device: where predictions are computed.
    """

    path: Path
    network: nn.Module
    normalization: AmplitudeNormalization
    experiment: Experiment
    task: Task
    checkpoint: Checkpoint
    device: torch.device

    @property
    def label(self) -> str:
        """What this is, for a person."""
        return f"{self.path.name}: task {self.experiment.task}, {self.experiment.network.name}"

    @property
    def takes_profile(self) -> bool:
        """Whether the amplitude step needs the profile of a hospital or of the image itself."""
        return self.experiment.amplitude.region == "site_gain"

    def deployed(self, own_profile: Tensor | None = None) -> DeployedModel:
        """Normalization and network as one module, in evaluation mode.

        Args:
            own_profile: (C, bins) of a hospital or a case, see `profile`; without one a `site_gain` measures that of
                the case that it is given.
        """
        normalization = DeployedNormalization(self.normalization, own_profile).to(self.device)
        return DeployedModel(normalization, self.network).eval()

    def profile(self, inputs: Iterable[Tensor]) -> Tensor | None:
        """Mean log profile (C, bins) of the inputs of a case or of a hospital's cases; None where no step needs one.

        What has no contrast is left out; a channel in which nothing has any is NaN, which gives a gain of 1.
        """
        if not self.takes_profile:
            return None
        mean = RunningAmplitude("before_training", momentum=1)
        for images in inputs:
            mean.update(self.normalization.statistics(images), has_contrast(images))
        return mean.mean

    def own_profile_of(self, image: SingleImage) -> Tensor | None:
        """What stands in for a hospital's profile where only one image is at hand; None where no step needs one.

        A volume shows its scanner: its own profile is taken. In tissue what is seen decides more than the scanner does,
        and a gain of 1 (the profile of all sites together) scores better: docs/using-the-model.md has the numbers.
        """
        if self.takes_profile and not image_use(self.experiment.task).shows_scanner:
            return self.normalization.target
        return self.profile(image.inputs())

    def predictor(self, own_profile: Tensor | None = None) -> Predict:
        """Logits of images in order, in float32 on the CPU; no image changes the answer for another one.

        With `batch_stats` norm layers the inputs of one call are normalized with each other, so that a call gets those
        of one case. The predictor raises NotFiniteError where a logit is not finite.
        """
        model, batch_size = self.deployed(own_profile), self.experiment.training.batch_size

        @torch.no_grad()
        def predict(images_BCHW: Tensor) -> Tensor:
            parts = [model(part.to(self.device)).float().cpu() for part in images_BCHW.split(batch_size)]
            return finite_logits(torch.cat(parts))

        return predict


def load_model(path: Path, expected: Sequence[Experiment] = (), device: str = "auto") -> LoadedModel:
    """Read a model file that a run left.

    Args:
        path: such as best_FL_global_model.pt.
        expected: experiments of which the model must have the task and one of the networks.
        device: `auto` (the GPU where there is one), `cpu` or `cuda`.

    Raises:
        ModelFileError: the file is missing, damaged, no model of HarmoFL or of a task from outside the package, of
            another task or network, lacks the layers that sites kept to themselves, its weights are not those of its
            network, or it holds no amplitude though its region needs one.
    """
    try:
        checkpoint = Checkpoint.load(path)
        experiment = Experiment.model_validate_json(json.dumps(checkpoint.experiment))
        _refuse_other(path, experiment, expected)
        task = load_task(experiment)
        if problem := kept_at_sites(experiment):
            raise ModelFileError(f"{path.name}: {problem}; take a run of a method that shares all layers")
        network = _network(path, experiment, checkpoint)
    except StateError as error:
        raise ModelFileError(f"{error}; take best_FL_global_model.pt of a finished run") from None
    except ValidationError as error:
        raise ModelFileError(f"{path.name}: its experiment: {first_problem(error, Experiment)}") from None
    except ExperimentError as error:
        raise ModelFileError(f"{path.name}: its experiment: {error}") from None
    place = _device(device)
    return LoadedModel(
        path=path,
        network=placed(network, place),
        normalization=_normalization(path, experiment, task, checkpoint),
        experiment=experiment,
        task=task,
        checkpoint=checkpoint,
        device=place,
    )


def kept_at_sites(experiment: Experiment) -> str:
    """Why a run leaves no model that anybody but its own sites could use, empty where it leaves one.

    FedBN (Li et al., ICLR 2021) keeps scale and shift of norm layers at the sites, so that estimating mean and
    variance anew from a hospital's images would not give a model either. On a network whose norm layers hold nothing
    it equals plain averaging and leaves one.
    """
    kept = experiment.federation.local_layers
    if kept == "none" or not partition_of(untrained_network(experiment), kept).local:
        return ""
    layers = {"norm": "its own norm layers", "all": "a model of its own"}[kept]
    return (
        f"method {experiment.method} (federation.local_layers '{kept}') leaves no model for other hospitals: each site "
        f"keeps {layers}"
    )


def _refuse_other(path: Path, experiment: Experiment, expected: Sequence[Experiment]) -> None:
    if is_outside(experiment.task):
        raise ModelFileError(
            f"{path.name}: its task {experiment.task} comes from outside the package; only models of "
            f"{', '.join(TASKS)} can be used here"
        )
    tasks = {other.task for other in expected}
    if expected and experiment.task not in tasks:
        raise ModelFileError(f"{path.name}: a model of task {experiment.task}, not of {' or '.join(sorted(tasks))}")
    if expected and experiment.network not in [other.network for other in expected]:
        wanted = " or ".join(dict.fromkeys(map(_described, expected)))
        raise ModelFileError(f"{path.name}: its network is {_described(experiment)}, the job's is {wanted}")


def _described(experiment: Experiment) -> str:
    network = experiment.network
    return f"{network.name} of width {network.width} with {network.norm} norm"


def _network(path: Path, experiment: Experiment, checkpoint: Checkpoint) -> nn.Module:
    network = untrained_network(experiment)
    state, held = network.state_dict(), checkpoint.model
    differing = sorted(state.keys() ^ held.keys())
    differing += [name for name, value in state.items() if name in held and not _fits(held[name], value)]
    if differing:
        shown = one_line(", ".join(differing[:SHOWN]))
        raise ModelFileError(
            f"{path.name}: its weights are not those of the {_described(experiment)} that its experiment names "
            f"(other in {count_text(len(differing), 'entry', 'entries')}: {shown}); the file was put "
            f"together from two runs"
        )
    unusable = [name for name, value in held.items() if not bool(torch.isfinite(value).all())]
    if unusable:
        raise ModelFileError(
            f"{path.name}: weights are not finite ({', '.join(unusable[:SHOWN])}); take another round's"
        )
    network.load_state_dict(held)
    return network.eval().requires_grad_(False)


def _fits(held: Tensor, wanted: Tensor) -> bool:
    return (held.shape, held.dtype, held.layout) == (wanted.shape, wanted.dtype, wanted.layout)


def _normalization(path: Path, experiment: Experiment, task: Task, checkpoint: Checkpoint) -> AmplitudeNormalization:
    normalization = build_normalization(experiment, task.in_channels)
    region, amplitude = experiment.amplitude.region, checkpoint.amplitude
    if region == "off":
        return normalization
    if amplitude is None:
        raise ModelFileError(
            f"{path.name}: holds no amplitude, which region {region} needs: it was saved before one was frozen; "
            "take the model of a later round"
        )
    if not (amplitude.dtype is torch.float32 and amplitude.layout is torch.strided):
        raise ModelFileError(f"{path.name}: its amplitude is no array of float32; take another file")
    try:
        normalization.freeze(amplitude, checkpoint.amplitude_images)
    except ValueError as error:
        raise ModelFileError(f"{path.name}: {error}") from None
    return normalization


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelFileError("--device cuda: this machine has no GPU that torch can use; leave it at auto or cpu")
    return torch.device(name)
