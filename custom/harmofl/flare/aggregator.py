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
from harmofl.flare.round_norms import add_difference, open_round
from harmofl.flare.server_run import ServerRun, current_run
from harmofl.flare.task_header import TRAIN_TASK
from harmofl.flare.wire import AmplitudeStatistic, MessageError, payload_bytes, round_of, unpack_update
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
        if site not in run.expected:
            raise MessageError("not a site of this job")
        if site in self.accepted:
            raise MessageError("second answer in one round")
        update = unpack_update(shareable)
        if (update.difference is None) == run.trains(site):
            raise MessageError("the answer carries no weights" if run.trains(site) else "the site was not to train")
        trained = update.numbers.get("received_sha256")
        if trained is None:
            raise MessageError("the answer does not say which model the site received (received_sha256 is missing)")
        if trained != run.model_sha256:
            # a difference to another base would move the global model to nowhere
            raise MessageError("the site did not train the model that was sent in this round")
        check_numbers(site, update, run, TRAIN_TASK)
        if self._mean is None:
            self._mean = open_round(run, fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS])
        amplitude = update.amplitude if run.estimates_in_first_round and run.amplitude is None else None
        if amplitude is not None:
            self._amplitude = self._amplitude or AmplitudeGathering(run.experiment)
            self._amplitude.check(amplitude)
            check_amplitude(amplitude, update, run)
        if update.difference is not None:
            note = add_difference(self._mean, site, update, run)
            if note:
                self.log_warning(fl_ctx, f"{site} is an outlier in round {current}: {note}")
        if amplitude is not None and self._amplitude is not None:
            self._amplitude.add(site, amplitude)
        self.accepted.append(site)
        run.count_bytes(site, payload_bytes(update))
        run.numbers[site] = update.numbers
        note_counts(site, update, run)

    def _refuse(self, site: str, reason: str, run: ServerRun, fl_ctx: FLContext) -> bool:
        self.log_error(fl_ctx, f"{outside_text(site)}: contribution refused: {reason}")
        run.refused.setdefault(outside_text(site), reason)
        return False
