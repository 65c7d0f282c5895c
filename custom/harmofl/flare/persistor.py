"""CheckpointPersistor: the initial model of an experiment, and the run's model files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.training import state_arrays
from harmofl.flare.server_run import FINAL_MODEL, ServerRun, current_run
from harmofl.flare.state import Checkpoint
from harmofl.tasks import untrained_network


class CheckpointPersistor(ModelPersistor):
    """Builds the seeded initial model, or loads the checkpoint that the job resumes from; saves after every round."""

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """The global weights that the first round begins with, as NumPy arrays."""
        run = current_run(fl_ctx)
        resumed = run.experiment.federation.resume_from
        if resumed:
            weights = {name: value.numpy() for name, value in Checkpoint.load(Path(resumed)).model.items()}
        else:
            weights = state_arrays(untrained_network(run.experiment))
        return make_model_learnable(weights, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Write FL_global_model.pt after a round."""
        run = current_run(fl_ctx)
        next_round = fl_ctx.get_prop(AppConstants.CURRENT_ROUND) + 1
        save_model_file(model[ModelLearnableKey.WEIGHTS], run, next_round, run.folder / FINAL_MODEL)


def save_model_file(weights: Mapping[str, np.ndarray], run: ServerRun, next_round: int, path: Path) -> None:
    """Write a self-contained model file: weights, frozen amplitude, experiment, and the run's record."""
    amplitude = run.amplitude
    Checkpoint(
        model={name: torch.as_tensor(np.asarray(value)) for name, value in weights.items()},
        experiment=run.experiment.model_dump(mode="json"),
        experiment_hash=run.experiment.hash,
        run_id=run.run_id,
        next_round=next_round,
        amplitude=None if amplitude is None else torch.as_tensor(amplitude.values),
        amplitude_images=0 if amplitude is None else amplitude.images,
        amplitude_sites=tuple(run.amplitude_sites),
        record=run.record(),
    ).save(path)
