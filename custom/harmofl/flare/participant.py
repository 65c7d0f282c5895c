"""What a site computes for each task: amplitude statistic, one round of training, evaluation."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from functools import cached_property
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harmofl.core.amplitude import AmplitudeNormalization
from harmofl.core.loss_terms import loss_terms
from harmofl.core.perturbation import WeightPerturbation
from harmofl.core.training import (
    RoundSettings,
    TrainingStoppedError,
    array_difference,
    arrays_sha256,
    batches,
    build_optimizer,
    fit_round,
    predict,
    seed_of,
)
from harmofl.experiment import Experiment
from harmofl.flare.local_amplitude import LocalAmplitude, build_normalization
from harmofl.flare.local_model import LocalModel
from harmofl.flare.pooled_data import pooled
from harmofl.flare.progress import FINDINGS
from harmofl.flare.site import SiteConfig, SiteError
from harmofl.flare.state import SiteState
from harmofl.flare.wire import AmplitudeStatistic, Arrays, ModelMessage, UpdateMessage
from harmofl.tasks import Evaluation, SiteData, load_task

MOST_WORKERS = 4  # decoding patches keeps up with a GPU then


class Participant:
    """One site in one run. Nothing it needs for the next task is kept in memory alone."""

    def __init__(
        self,
        experiment: Experiment,
        site: SiteConfig,
        run_id: str,
        should_stop: Callable[[], bool],
        logger: Logger,
        *,
        pool: Mapping[str, Path | None] | None = None,
    ) -> None:
        """Bind a resolved experiment to a site; nothing is read yet.

        Args:
            experiment: as the server resolved it.
            site: this site's own settings.
            run_id: issued by the server.
            should_stop: asked between batches.
            logger: this site's.
            pool: in a run on pooled data the data root of every site by name, None for demo data; the first trains.
        """
        self._experiment, self._pool = experiment, dict(pool or {})
        self._site = site
        self._state = SiteState(site.state_root / "state", run_id)
        self._should_stop = should_stop
        self._logger = logger
        self._task = load_task(experiment)
        self._local = LocalModel(experiment, self._state, logger)
        if site.threads:
            torch.set_num_threads(site.threads)

    @cached_property
    def data(self) -> SiteData:
        """This site's data, read once a process; findings are logged here and leave the site as counts only."""
        if self._pool and self._trains:
            data = pooled(self._site.name, {name: self._open(name, root) for name, root in self._pool.items()})
        else:
            data = self._open(self._site.name, self._site.data_root)
        self._log_findings(data)
        if not data.cases.get("training"):
            raise SiteError("no_data", f"site {self._site.name} has no case to train on; run harmofl check at the site")
        items, patients = len(data.training), len(data.training_patients)
        if items != patients:
            raise SiteError("patients", f"task {self._experiment.task} names {patients} patients of {items} items")
        return data

    @property
    def _trains(self) -> bool:
        return not self._pool or self._site.name == min(self._pool)

    def _open(self, name: str, root: Path | None) -> SiteData:
        folder, experiment = self._site.state_root, self._experiment
        if root is None:
            cases = folder / "demo_data" / experiment.hash / name  # a kept state root may hold others
            self._task.write_demo(cases, name, experiment)
        else:
            cases = self._task.locate(root, name, experiment)
        return self._task.open_site(cases, name, experiment, folder / "cache")

    def _log_findings(self, data: SiteData) -> None:
        """Log what was found once a run, not in every task; files with the same notice share a line."""
        if self._state.load_once("findings") is not None:
            return
        notices: dict[str, list[str]] = {}
        for finding in data.findings:
            if finding.severity == "notice":
                notices.setdefault(finding.message, []).append(finding.subject)
            else:
                FINDINGS.warning(str(finding))
        for message, subjects in notices.items():
            more = f" and {len(subjects) - 1} more" if len(subjects) > 1 else ""
            FINDINGS.info(f"notice: {subjects[0]}{more}: {message}")
        self._state.save_once("findings", {"count": len(data.findings)})

    def _log_late_findings(self) -> None:
        """Log what came up while training or scoring decoded files."""
        for finding in self.data.late_findings():
            FINDINGS.warning(str(finding))

    @cached_property
    def _amplitude(self) -> LocalAmplitude:
        def images(dataset: "Dataset[Any]") -> Iterator[Tensor]:
            for batch, _ in batches(dataset, self._experiment.training.batch_size, None, self._workers):
                self._stop_if_asked()
                yield batch.to(self.device)

        return LocalAmplitude(
            self._experiment,
            self._task.in_channels,
            site=self._site,
            state=self._state,
            data=self.data,
            images=images,
            logger=self._logger,
        )

    @cached_property
    def device(self) -> torch.device:
        """The device that this site's settings name, or the GPU where there is one."""
        if self._site.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._site.device.startswith("cuda") and not torch.cuda.is_available():
            raise SiteError("no_gpu", f"site {self._site.name} asks for a GPU and has none; set device to auto or cpu")
        return torch.device(self._site.device)

    def _make_deterministic(self) -> None:
        """Let CUDA choose repeatable kernels; the few that have none warn and go on."""
        if self.device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.benchmark = False
            torch.use_deterministic_algorithms(True, warn_only=True)

    def estimate_amplitude(self) -> UpdateMessage:
        """The mean of the training images' amplitude statistics, as far as it may leave (`before_training`)."""
        return UpdateMessage(amplitude=self._amplitude.before_training(), numbers=self._counts())

    def train(self, round_number: int, received: ModelMessage, best_round: int | None = None) -> UpdateMessage:
        """Score the received model on validation data, train it for one round, answer with the difference.

        Args:
            round_number: of this round.
            received: the entries that travel, and the amplitude once it is frozen.
            best_round: the best one so far, whose local layers are kept.
        """
        started = time.monotonic()
        self._make_deterministic()
        self._local.keep_best(best_round)
        network = self._placed(self._local.before_round(received.weights, round_number))
        normalization = self._normalization(received.amplitude)
        validation = self._evaluate(network, normalization, self.data.validation)
        before = self._local.shared(network)
        score = None if self._local.begins_anew else validation.key_score
        numbers = self._counts() | {"validation": score, "received_sha256": arrays_sha256(before)}
        if not self._trains:
            return UpdateMessage(numbers=numbers | {"seconds": round(time.monotonic() - started, 2)})
        optimizer = self._optimizer(network, round_number)
        result = fit_round(
            network,
            normalization,
            optimizer,
            self._task.loss(),
            self.data.training,
            settings=self._round_settings(),
            seed=seed_of(self._experiment.seed, self._site.name, round_number),
            should_stop=self._should_stop,
            terms=loss_terms(self._experiment.training, network, self._local.previous(round_number)),
        )
        self._log_late_findings()
        difference = array_difference(before, self._local.shared(network))
        statistic = None if received.amplitude is not None else self._amplitude.of_first_round(normalization)
        kept = self._local.remembered(network)
        self._state.save_round(round_number, {"optimizer": optimizer.state_dict(), **kept})
        numbers |= {
            "steps": result.steps,
            "skipped_steps": result.skipped_steps,
            "images": result.images,
            "loss": result.loss,
            "seconds": round(time.monotonic() - started, 2),
        }
        return UpdateMessage(difference, statistic, numbers)

    def evaluate(self, received: ModelMessage, best_round: int | None = None) -> UpdateMessage:
        """Score the final and the best model on the test data, which no other task touches.

        Args:
            received: both models, and the amplitude.
            best_round: the round whose local layers belong to the best model.
        """
        normalization = self._normalization(received.amplitude)
        network = self._placed(self._local.last(received.weights))
        final_validation = self._evaluate(network, normalization, self.data.validation)
        scored = {"final": self._evaluate(network, normalization, self.data.test)}
        if received.best_weights is not None:
            network = self._placed(self._local.best(received.best_weights, best_round))
            scored["best"] = self._evaluate(network, normalization, self.data.test)
        self._log_late_findings()
        numbers = self._counts() | {
            "validation": final_validation.key_score,
            "test": {model: evaluation.scores for model, evaluation in scored.items()},
            "pooled": {
                model: {name: list(astuple(estimate)) for name, estimate in evaluation.pooled.items()}
                for model, evaluation in scored.items()
            },
        }
        return UpdateMessage(numbers=numbers)

    def network(self, weights: Arrays) -> nn.Module:
        """This site's network with the weights of a message, on its device."""
        return self._placed(self._local.last(weights))

    def normalization(self, amplitude: AmplitudeStatistic | None) -> AmplitudeNormalization:
        """The intensity and amplitude step in front of this site's network, on its device."""
        return self._normalization(amplitude)

    def _placed(self, network: nn.Module) -> nn.Module:
        return network.to(self.device, memory_format=torch.channels_last)

    def _normalization(self, amplitude: AmplitudeStatistic | None) -> AmplitudeNormalization:
        normalization = build_normalization(self._experiment, self._task.in_channels).to(self.device)
        if amplitude is None:
            return normalization
        normalization.freeze(torch.as_tensor(amplitude.values), amplitude.images)
        if self._experiment.amplitude.region == "site_gain":
            normalization.set_own(self._amplitude.own_profile())
        return normalization

    def _optimizer(self, network: nn.Module, round_number: int) -> WeightPerturbation:
        """The optimizer of a round, with the moments of the one before where they are kept."""
        given = self._experiment.training
        inner = build_optimizer(network, given.optimizer, given.learning_rate, given.momentum, given.weight_decay)
        optimizer = WeightPerturbation(inner, self._experiment.perturbation.alpha, network)
        if given.keep_moments and round_number > 0:
            self._restore(optimizer, round_number)
        return optimizer

    def _restore(self, optimizer: WeightPerturbation, round_number: int) -> None:
        held = self._state.load_round(round_number - 1)
        if held is None:
            self._logger.warning(f"round {round_number}: no state of round {round_number - 1}; moments start anew")
            return
        optimizer.load_state_dict(held["optimizer"])

    @property
    def _workers(self) -> int:
        """Loader processes: the site's, else some where a task decodes images when asked for them."""
        if self._site.workers is not None:
            return self._site.workers
        return min(MOST_WORKERS, torch.get_num_threads()) if self._task.decodes_on_access else 0

    def _evaluate(self, network: nn.Module, normalization: AmplitudeNormalization, split: Any) -> Evaluation:
        settings = self._experiment.training

        def logits(images: Tensor) -> Tensor:
            self._stop_if_asked()
            return predict(network, normalization, images, settings.batch_size, settings.precision)

        return self._task.evaluate(logits, split, workers=self._workers)

    def _round_settings(self) -> RoundSettings:
        settings = self._experiment.training
        return RoundSettings(
            batch_size=settings.batch_size,
            epochs=settings.local_epochs,
            augmentation=settings.augmentation,
            clip_norm=settings.clip_norm,
            precision=settings.precision,
            workers=self._workers,
        )

    def _counts(self) -> dict[str, Any]:
        data = self.data
        return {"cases": data.cases, "skipped": data.skipped(), "warnings": data.warned, "demo": self._site.demo}

    def _stop_if_asked(self) -> None:
        if self._should_stop():
            raise TrainingStoppedError("stopped between two batches")
