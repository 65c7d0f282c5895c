"""A site's amplitude statistic: the exact one that it uses itself, and what it sends of it."""

from collections.abc import Callable, Iterator
from logging import Logger, LoggerAdapter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from harmofl.core.amplitude import AmplitudeNormalization, Estimation
from harmofl.core.gaussian_mechanism import ClippedMean, clipping_center
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.site import SiteConfig
from harmofl.flare.state import SiteState
from harmofl.flare.wire import AmplitudeStatistic
from harmofl.tasks import SiteData

Images = Callable[["Dataset[Any]"], Iterator[Tensor]]


class LocalAmplitude:
    """Measures a site's training images.

    The site's own statistic is exact and stays here. What leaves is that statistic, where enough patients stand behind
    it. A site that adds noise sends instead, whatever the estimation, the mean over all training patients of each one's
    mean statistic, clipped: the noise for it is known, and the site's filter adds it.
    """

    def __init__(
        self,
        experiment: Experiment,
        channels: int,
        *,
        site: SiteConfig,
        state: SiteState,
        data: SiteData,
        images: Images,
        logger: Logger | LoggerAdapter[Logger],
    ) -> None:
        """Bind to a site's data; `images` gives the batches of a data set in order, on the site's device."""
        self._experiment, self._channels, self._site, self._state = experiment, channels, site, state
        self._data, self._images, self._logger = data, images, logger

    def before_training(self) -> AmplitudeStatistic | None:
        """What leaves of the mean over all training images, None where too few patients stand behind it."""
        return self._sent(self._exact())

    def of_first_round(self, normalization: AmplitudeNormalization) -> AmplitudeStatistic | None:
        """What leaves of the statistic that was gathered while training, None where there is none or of too few."""
        local = normalization.local_statistic
        if local is None:
            return None
        return self._sent(self._kept(local, normalization.local_images))

    def own_profile(self) -> Tensor:
        """This site's own mean profile; a site that joined late or lost its state computes it now."""
        held = self._state.load_once("amplitude")
        if held is None:
            return torch.as_tensor(self._exact().values)
        own: Tensor = held["own"]
        return own

    def _exact(self) -> AmplitudeStatistic:
        exact = build_normalization(self._experiment, self._channels, estimation="before_training")
        for images in self._images(self._data.training):
            exact.observe(images)
        statistic = exact.local_statistic
        assert statistic is not None, "a training split is never empty here"
        return self._kept(statistic, exact.local_images)

    def _kept(self, own: Tensor, images: int) -> AmplitudeStatistic:
        self._state.save_once("amplitude", {"own": own.cpu(), "images": images})
        # a first batch may hold fewer images than there are patients
        return AmplitudeStatistic(own.cpu().numpy(), images, patients=min(self._data.patient_count, images))

    def _sent(self, measured: AmplitudeStatistic) -> AmplitudeStatistic | None:
        """The mean amplitude of few is close to an image: the stricter of the site's and the job's minimum holds."""
        needed = max(self._experiment.amplitude.minimum_cases, self._site.minimum_cases)
        images, patients, noise = measured.images, self._data.patient_count, self._site.amplitude_noise
        if (patients if noise else min(patients, images)) < needed:
            self._logger.warning(
                f"amplitude not sent: {count_text(images, 'image')} of "
                f"{count_text(patients, 'training patient')}, {needed} needed"
            )
            return None
        return self._clipped(noise.clip) if noise else measured

    def _clipped(self, clip: float) -> AmplitudeStatistic:
        """One pass over all training images, patient by patient."""
        settings, size = self._experiment.amplitude, self._experiment.data
        center = clipping_center(settings.region, self._channels, size.height, size.width, settings.low_fraction)
        mean = ClippedMean(center, clip, self._data.patient_count)
        normalization = build_normalization(self._experiment, self._channels)
        patients, order = self._data.training_patients, self._patient_by_patient()
        start = 0
        for images in self._images(Subset(self._data.training, order)):
            items = order[start : start + len(images)]
            start += len(images)
            unreadable = set(self._data.unreadable())  # another patient's image would stand in for it
            rows = [row for row, item in enumerate(items) if item not in unreadable]
            if rows:
                mean.add(normalization.statistics(images[rows]), [patients[items[row]] for row in rows])
        return AmplitudeStatistic(mean.result().numpy(), mean.images, self._data.patient_count, clip)

    def _patient_by_patient(self) -> list[int]:
        """All training items, those of a patient in a row."""
        places: dict[Any, list[int]] = {}
        for item, patient in enumerate(self._data.training_patients):
            places.setdefault(patient, []).append(item)
        return [item for items in places.values() for item in items]


def build_normalization(
    experiment: Experiment, channels: int, estimation: Estimation | None = None
) -> AmplitudeNormalization:
    """The intensity and amplitude step that an experiment describes, with another estimation where one is given."""
    settings = experiment.amplitude
    return AmplitudeNormalization(
        intensity=settings.intensity,
        region=settings.region,
        low_fraction=settings.low_fraction,
        estimation=estimation or settings.estimation,
        momentum=settings.momentum,
        channels=channels,
        height=experiment.data.height,
        width=experiment.data.width,
    )
