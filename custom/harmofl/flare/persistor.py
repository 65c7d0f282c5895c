"""CheckpointPersistor: the initial model of an experiment, and the run's model files."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.best_round import scores_higher
from harmofl.core.exchange import from_exchange_types
from harmofl.core.partition import select
from harmofl.core.training import arrays_sha256
from harmofl.evidence.results import RoundRecord
from harmofl.experiment import RULES
from harmofl.flare.record import mean_validation
from harmofl.flare.server_run import ServerRun, current_run
from harmofl.flare.server_store import BEST_MODEL, FINAL_MODEL, checkpoint_path
from harmofl.flare.state import Checkpoint, StateError


class CheckpointPersistor(ModelPersistor):
    """Builds the seeded initial model, or loads the checkpoint that the job resumes from; saves after every round."""

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """The global weights that the first round begins with, as NumPy arrays."""
        run = current_run(fl_ctx)
        resumed = run.experiment.federation.resume_from
        if resumed:
            weights = server_weights(Checkpoint.load(checkpoint_path(resumed, run.store)), run)
            save_model_file(weights, run, run.start_round, run.folder / FINAL_MODEL)  # this job can be resumed as well
        else:
            weights = run.initial_weights()
        return make_model_learnable(weights, {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Write FL_global_model.pt after a round."""
        run = current_run(fl_ctx)
        next_round = fl_ctx.get_prop(AppConstants.CURRENT_ROUND) + 1
        save_model_file(model[ModelLearnableKey.WEIGHTS], run, next_round, run.folder / FINAL_MODEL)


def keep_received_if_best(run: ServerRun, record: RoundRecord, weights: Mapping[str, np.ndarray]) -> None:
    """The same for the model that a round began with: the sites validated it then, and the round before made it."""
    keep_if_best(run, record.validation_mean, record.round - 1, weights)


def keep_if_best(run: ServerRun, score: float | None, round_number: int, weights: Mapping[str, np.ndarray]) -> None:
    """Save the model that came out of a round as the best one where it scores higher, as `scores_higher` has it.

    Where no weights travel there is no file: the sites keep what they had after the best round.

    Args:
        run: its books hold what the sites scored the model.
        score: mean of that.
        round_number: that the model came out of; the untrained one, of round -1, is never the best.
        weights: the model's.
    """
    scores = run.validation_of(round_number)
    if round_number < 0 or score is None or not scores_higher(scores, run.best_scores):
        return
    run.best_round, run.best_score, run.best_scores = round_number, score, scores
    if run.has_global_model:
        save_model_file(weights, run, round_number + 1, run.folder / BEST_MODEL)


def save_at_the_end(
    weights: Mapping[str, np.ndarray], run: ServerRun, validation: Mapping[str, float | None], next_round: int
) -> None:
    """Settle the best round by what the sites scored the last model on validation, and save the final model."""
    run.final_validation = dict(validation)
    keep_if_best(run, mean_validation(validation), next_round - 1, weights)
    if run.best_round is None:
        run.best_round = next_round - 1
        if run.has_global_model:
            save_model_file(weights, run, next_round, run.folder / BEST_MODEL)
    save_model_file(weights, run, next_round, run.folder / FINAL_MODEL)


def best_weights(run: ServerRun) -> dict[str, np.ndarray] | None:
    """What travels of the best model so far; None where there is none yet."""
    if run.best_round is None or not run.has_global_model:
        return None if run.best_round is None else {}
    return run.for_sites(_shared(Checkpoint.load(run.folder / BEST_MODEL).model, run))


def server_weights(checkpoint: Checkpoint, run: ServerRun) -> dict[str, np.ndarray]:
    """The server's own weights of a checkpoint, in float32: its model's, or those that this one is rounded from.

    Raises:
        StateError: they do not round to the checkpoint's model.
    """
    model = _shared(checkpoint.model, run)
    own = {name: value.numpy() for name, value in checkpoint.server_weights.items() if _is_plain(value)}
    rounded = {name for name, value in run.for_sites(model).items() if value.dtype != model[name].dtype}
    weights = {name: own.get(name, value) for name, value in model.items()}
    fits = checkpoint.server_weights.keys() == own.keys() == rounded
    fits = fits and all(own[name].shape == model[name].shape for name in own)
    if not fits or arrays_sha256(run.as_received(weights)) != arrays_sha256(model):
        raise StateError(
            f"{FINAL_MODEL} holds other server weights than its model is rounded from; copy the checkpoint again"
        )
    return weights


def _is_plain(value: torch.Tensor) -> bool:
    return value.dtype is torch.float32 and value.layout is torch.strided


def _shared(model: Mapping[str, torch.Tensor], run: ServerRun) -> dict[str, np.ndarray]:
    """The entries of a model file that travel, as arrays."""
    return select({name: value.numpy() for name, value in model.items()}, run.partition.shared)


def save_model_file(weights: Mapping[str, np.ndarray], run: ServerRun, next_round: int, path: Path) -> None:
    """Write a self-contained model file: weights, frozen amplitude, experiment, and the run's record.

    Its weights are those that the sites receive, train and score. The server stores a copy, so that a later job can
    resume the run. The copy of the final model also holds what only the server has: the weights before they were
    rounded, and the moments.

    Args:
        weights: the server's own.
        run: whose model it is.
        next_round: that begins with it.
        path: the file's.
    """
    amplitude, sent, resumes = run.amplitude, run.for_sites(weights), path.name == FINAL_MODEL
    own = {name: value for name, value in weights.items() if sent[name].dtype != value.dtype}
    Checkpoint(
        model=_tensors(run.whole_model(from_exchange_types(sent))),
        experiment=run.experiment.model_dump(mode="json"),
        experiment_hash=run.experiment.hash,
        rules=dict(RULES),
        run_id=run.run_id,
        next_round=next_round,
        amplitude=None if amplitude is None else torch.as_tensor(amplitude.values),
        amplitude_images=0 if amplitude is None else amplitude.images,
        amplitude_sites=tuple(run.amplitude_sites),
        record=run.record(),
        server_moments=run.rule.moments if resumes else {},
        server_weights=_tensors(own) if resumes else {},
    ).save(path)
    run.keep(path.name)


def _tensors(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(np.asarray(value)) for name, value in weights.items()}
