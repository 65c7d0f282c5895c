"""HarmoFLAggregator: the mean of accepted contributions and, while it is estimated, of their amplitudes."""

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.aggregator import Aggregator
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.aggregation import StreamingMean
from harmofl.core.contributions import ContributionError
from harmofl.core.server_rules import RoundMean
from harmofl.core.spectra import statistic_shape
from harmofl.evidence.results import NoiseStatement
from harmofl.experiment import Experiment
from harmofl.flare.claims import check_amplitude, check_numbers, note_counts
from harmofl.flare.relay_message import GatheredAnswers, unpack_gathered
from harmofl.flare.round_norms import add_difference, merge_partial, open_round
from harmofl.flare.server_run import ServerRun, current_run
from harmofl.flare.task_header import TRAIN_TASK
from harmofl.flare.wire import (
    AmplitudeStatistic,
    MessageError,
    UpdateMessage,
    payload_bytes,
    round_of,
    unpack_update,
)
from harmofl.sections import outside_text
from harmofl.tasks import load_task


class AmplitudeGathering:
    """Mean of the sites' amplitude statistics, by sites (1/N, Algorithm 1) or by images.

    Attributes:
        sites: whose statistics are in it, in the order of arrival.
        patients: by site, how many are behind its statistic.
        noise: by site, what was said about the noise on its statistic.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Prepare for statistics of the shape that the experiment's region has."""
        settings, data = experiment.amplitude, experiment.data
        channels = load_task(experiment).in_channels
        shape = statistic_shape(settings.region, channels, data.height, data.width, settings.low_fraction)
        self._logarithmic = settings.region == "site_gain"
        self._by_images = settings.average == "images"
        self._mean = StreamingMean({"amplitude": np.zeros(shape, np.float32)})
        self._images = 0
        self.sites: list[str] = []
        self.patients: dict[str, int] = {}
        self.noise: dict[str, NoiseStatement] = {}

    def check(self, statistic: AmplitudeStatistic) -> None:
        """Refuse a statistic that must not enter the mean, before anything is added.

        Raises:
            ContributionError: wrong shape, not finite, an amplitude below 0, or a site whose filter did not run.
        """
        if statistic.clip is not None:
            raise ContributionError(
                "the amplitude was clipped for noise that was never added; list harmofl.flare.filters.AmplitudeFilter "
                "in the scope's task_result_filters in the site's local/privacy.json"
            )
        if not self._logarithmic and bool((statistic.values < 0).any()):
            raise ContributionError("the amplitude holds values below 0")
        self._mean.check({"amplitude": statistic.values}, statistic.images)

    def add(self, site: str, statistic: AmplitudeStatistic) -> None:
        """Add one site's statistic.

        Raises:
            ContributionError: see `check`; nothing was added.
        """
        self.check(statistic)
        self._mean.add({"amplitude": statistic.values}, statistic.images if self._by_images else 1)
        self._images += statistic.images
        self.sites.append(site)
        if statistic.patients is not None:
            self.patients[site] = statistic.patients
        if statistic.noise is not None:
            self.noise[site] = statistic.noise

    def result(self) -> AmplitudeStatistic:
        """The global amplitude."""
        return AmplitudeStatistic(self._mean.mean()["amplitude"], self._images)


class HarmoFLAggregator(Aggregator):
    """Checks a whole contribution before any of it is added. `accept` never raises: it refuses, and says why."""

    def __init__(self) -> None:
        """Start empty; the first contribution of a round opens the mean."""
        super().__init__()
        self._mean: RoundMean | None = None
        self._amplitude: AmplitudeGathering | None = None
        self.accepted: list[str] = []

    def reset(self, fl_ctx: FLContext) -> None:
        """Forget the finished round."""
        self._mean, self._amplitude, self.accepted = None, None, []

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Add one site's update, or refuse it with a line in the log and in the round's record."""
        site = shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None) or "unknown site"
        run = current_run(fl_ctx)
        try:
            self._add(site, shareable, run, fl_ctx)
        except (ContributionError, MessageError) as error:
            return self._refuse(site, str(error), run, fl_ctx)
        except Exception as error:
            # a value that cannot even be read, such as an object that raises when it is converted
            return self._refuse(site, f"unreadable contribution ({type(error).__name__})", run, fl_ctx)
        return True

    def aggregate(self, fl_ctx: FLContext) -> Shareable:
        """The mean difference of the round, empty where nothing was accepted (the controller then fails the job)."""
        difference = self._mean.mean() if self._mean is not None and self._mean.count else {}
        return DXO(DataKind.WEIGHT_DIFF, data=difference).to_shareable()

    def gathered_amplitude(self) -> AmplitudeGathering | None:
        """The amplitudes that came with this round's contributions, if any did."""
        return self._amplitude

    def _add(self, site: str, shareable: Shareable, run: ServerRun, fl_ctx: FLContext) -> None:
        current = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        if round_of(shareable) != current:
            raise MessageError(f"answer of round {round_of(shareable)} came in round {current}")
        if site in run.relays:
            self._add_gathered(site, unpack_gathered(shareable), run, fl_ctx)
            return
        if site not in run.expected or any(site in behind for behind in run.relays.values()):
            raise MessageError("not a site of this job that answers to the server")
        if site in self.accepted:
            raise MessageError("second answer in one round")
        update = unpack_update(shareable)
        if (update.difference is None) == run.trains(site):
            raise MessageError("the answer carries no weights" if run.trains(site) else "the site was not to train")
        _check_received_model(update, run)
        check_numbers(site, update, run, TRAIN_TASK)
        mean = self._opened(run, fl_ctx)
        amplitude = update.amplitude if run.estimates_in_first_round and run.amplitude is None else None
        if amplitude is not None:
            self._amplitude = self._amplitude or AmplitudeGathering(run.experiment)
            self._amplitude.check(amplitude)
            check_amplitude(amplitude, update, run)
        if update.difference is not None:
            note = add_difference(mean, site, update, run)
            if note:
                self.log_warning(fl_ctx, f"{site} is an outlier in round {current}: {note}")
        if amplitude is not None and self._amplitude is not None:
            self._amplitude.add(site, amplitude)
        self._accepted(site, update, run)

    def _add_gathered(self, relay: str, gathered: GatheredAnswers, run: ServerRun, fl_ctx: FLContext) -> None:
        """The sum of a relay's sites, as a whole or not at all: it cannot be told what of it one of them made."""
        current, updates = fl_ctx.get_prop(AppConstants.CURRENT_ROUND), gathered.updates
        for site, reason in gathered.refused.items():
            if site in run.relays[relay]:
                run.refused[site] = f"at its relay {relay}: {reason}"
        if not updates:
            raise MessageError("the relay has no site's answer")
        for site, update in updates.items():
            if site not in run.relays[relay] or site in self.accepted:
                raise MessageError(f"{outside_text(site)} is no site of this relay, or has answered before")
            _check_received_model(update, run)
            check_numbers(site, update, run, TRAIN_TASK)
        amplitudes = {
            site: update.amplitude
            for site, update in updates.items()
            if update.amplitude is not None and run.estimates_in_first_round and run.amplitude is None
        }
        for site, statistic in amplitudes.items():
            self._amplitude = self._amplitude or AmplitudeGathering(run.experiment)
            self._amplitude.check(statistic)
            check_amplitude(statistic, updates[site], run)
        merge_partial(self._opened(run, fl_ctx), gathered, run)
        for site, update in updates.items():
            if note := run.sent[site].note:
                self.log_warning(fl_ctx, f"{site} is an outlier in round {current}: {note}")
            if site in amplitudes and self._amplitude is not None:
                self._amplitude.add(site, amplitudes[site])
            self._accepted(site, update, run, gathered.notes[site].weight_bytes)

    def _opened(self, run: ServerRun, fl_ctx: FLContext) -> RoundMean:
        if self._mean is None:
            held = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
            self._mean = open_round(run, run.as_received(held))
        return self._mean

    def _accepted(self, site: str, update: UpdateMessage, run: ServerRun, at_relay: int = 0) -> None:
        self.accepted.append(site)
        sent = payload_bytes(update)
        run.count_bytes(site, sent | {"weights": sent["weights"] + at_relay})
        run.numbers[site] = update.numbers
        note_counts(site, update, run)

    def _refuse(self, site: str, reason: str, run: ServerRun, fl_ctx: FLContext) -> bool:
        self.log_error(fl_ctx, f"{outside_text(site)}: contribution refused: {reason}")
        run.refused.setdefault(outside_text(site), reason)
        return False


def _check_received_model(update: UpdateMessage, run: ServerRun) -> None:
    trained = update.numbers.get("received_sha256")
    if trained is None:
        raise MessageError("the answer does not say which model the site received (received_sha256 is missing)")
    if trained != run.model_sha256:
        # a difference to another base would move the global model to nowhere
        raise MessageError("the site did not train the model that was sent in this round")
