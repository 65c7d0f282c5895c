"""Rounds as FLARE runs them, server and sites in one process: messages serialized, sites new objects for every task."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs

from harmofl.experiment import Experiment
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.generator import HarmoFLShareableGenerator
from harmofl.flare.participant import Participant
from harmofl.flare.persistor import save_model_file
from harmofl.flare.record import close_round
from harmofl.flare.server_run import _KEY, ServerRun
from harmofl.flare.server_store import FINAL_MODEL
from harmofl.flare.site import SiteConfig
from harmofl.flare.wire import pack_update, unpack_model

SILENT = logging.getLogger("harmofl.benchmark")


class ServedRounds:
    """A run whose amplitude region is off; all sites train on the same folder of cases."""

    def __init__(self, experiment: Experiment, data: Path, folder: Path, sites: Sequence[str]) -> None:
        """Open the run; `folder` receives the state of sites and server."""
        common_decomposers.register()
        server = folder / "server"
        server.mkdir(parents=True)
        self.experiment, self.data, self.folder = experiment, data, folder
        self.run = ServerRun(experiment, False, server, sorted(sites), run_id="benchmark")
        self.aggregator, self.generator = HarmoFLAggregator(), HarmoFLShareableGenerator()
        self.model = make_model_learnable(self.run.initial_weights(), {})
        self.context: FLContext = FLContextManager(None, "server", "job", {}, {}).new_context()
        self.context.set_prop(_KEY, self.run, private=True, sticky=True)

    def round(self, number: int) -> None:
        """One round of all sites, one after the other, with the server's books and model file."""
        self._set(AppConstants.CURRENT_ROUND, number)
        self._set(AppConstants.GLOBAL_MODEL, self.model)
        task = fobs.dumps(self.generator.learnable_to_shareable(self.model, self.context))
        for site in self.run.expected:
            answer: Shareable = fobs.loads(self._answer(site, number, task))
            answer.add_cookie(AppConstants.CONTRIBUTION_ROUND, number)
            answer.set_peer_props({ReservedKey.IDENTITY_NAME: site})
            if not self.aggregator.accept(answer, self.context):
                raise RuntimeError(f"the answer of {site} was refused: {self.run.refused[site]}")
        close_round(self.run, number, list(self.run.expected))
        mean = self.aggregator.aggregate(self.context)
        self.model: ModelLearnable = self.generator.shareable_to_learnable(mean, self.context)
        save_model_file(self.model[ModelLearnableKey.WEIGHTS], self.run, number + 1, self.run.folder / FINAL_MODEL)
        self.aggregator.reset(self.context)

    def _answer(self, site: str, number: int, task: bytes) -> Any:
        config = SiteConfig(site, False, self.data, self.folder / site, "cpu", minimum_cases=1, threads=1)
        participant = Participant(self.experiment, config, self.run.run_id, lambda: False, SILENT)
        return fobs.dumps(pack_update(participant.train(number, unpack_model(fobs.loads(task)))))

    def _set(self, key: str, value: Any) -> None:
        self.context.set_prop(key, value, private=True, sticky=True)
