"""A site's amplitude statistic: the exact one that it uses itself, and what it sends of it."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from logging import Logger, LoggerAdapter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from harmofl.core.amplitude import AmplitudeNormalization, Estimation, RunningAmplitude
from harmofl.core.contrast import has_contrast
from harmofl.core.gaussian_mechanism import ClippedMean, clipping_center
from harmofl.data.findings import count_text
from harmofl.experiment import Experiment
from harmofl.flare.releases import Offer, Outcome, members_of, release
from harmofl.flare.site import SiteConfig
from harmofl.flare.state import SiteState
from harmofl.flare.wire import AmplitudeStatistic
from harmofl.tasks import SiteData

BLANK_IMAGE = "blank_image"  # code of the training images that were left out in a channel
RELEASES = "releases"  # in a run's state: how many statistics of its task have left this site
_KEPT = "amplitude"
Images = Callable[["Dataset[Any]"], Iterator[Tensor]]


class LocalAmplitude:
    """Measures a site's training images.

    The site's own statistic is exact and stays here. What leaves is that statistic, where enough patients stand behind
    it: those with an image that carries weight in it and has contrast, counted in the channel in which they are fewest.
    A site that adds noise sends instead, whatever the estimation, the mean over all training patients of each one's
    mean statistic, clipped: the noise for it is known, and the site's filter adds it. Where every patient is clipped,
    the clipped mean says nothing of the site, and none is sent; nor is it with the split `as_published`, in which one
    patient's images move those of others into training or out of it, so that the noise would be too small.
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
        self.offer: Offer | None = None

    def before_training(self) -> AmplitudeStatistic | None:
        """What leaves of the mean over all training images, None where too few patients stand behind it."""
        exact = self._exact()
        return self._sent(exact, self._kept(exact))

    def of_first_round(self, normalization: AmplitudeNormalization) -> AmplitudeStatistic | None:
        """What leaves of the statistic that was gathered while training, None where there is none or of too few."""
        if not normalization.local.began:
            return None
        return self._sent(normalization.local, self._kept(normalization.local))

    def own_profile(self) -> Tensor:
        """This site's own mean profile; a site that joined late or lost its state computes it now."""
        held = self._state.load_once(_KEPT)
        if held is None:
            return torch.as_tensor(self._kept(self._exact()).values)
        own: Tensor = held["own"]
        return own

    @property
    def blank_images(self) -> int:
        """How many training images were left out of the statistic, in a channel at least, so far as it was measured."""
        held = self._state.load_once(_KEPT)
        return 0 if held is None else int(held.get("blank", 0))

    def _exact(self) -> RunningAmplitude:
        exact = build_normalization(self._experiment, self._channels, estimation="before_training")
        start = 0
        for images in self._images(self._data.training):
            exact.observe(images, items_B=torch.arange(start, start + len(images)))
            start += len(images)
        assert exact.local.began, "a training split is never empty here"
        return exact.local

    def _kept(self, local: RunningAmplitude) -> AmplitudeStatistic:
        own, blank = local.mean.cpu(), local.blank
        self._state.save_with_round(_KEPT, {"own": own, "images": local.images, "blank": blank})
        if blank:
            self._logger.warning(f"{blank} training images have no contrast in a channel, which is in no amplitude")
        return AmplitudeStatistic(own.numpy(), local.images, patients=patients_behind(local, self._data))

    def _sent(self, local: RunningAmplitude, measured: AmplitudeStatistic) -> AmplitudeStatistic | None:
        """The mean amplitude of few is close to an image: the stricter of the site's and the job's minimum holds."""
        noise = self._site.amplitude_noise
        if noise is None:
            assert measured.patients is not None, "of a site"
            return self._released(local, measured) if self._are_enough(measured.patients, measured.images) else None
        if self._experiment.data.split == "as_published":
            self._logger.warning(
                "amplitude not sent: with data.split as_published the images of one patient decide which images of the "
                "others train, so that the noise would not hide that patient; this site trains with the global one"
            )
            return None
        if not self._are_enough(self._data.patient_count):
            return None
        clipped = self._clipped(noise.relative_clip)
        if clipped is not None:
            unreadable = set(self._data.unreadable())
            marks = ["u" if item in unreadable else "1" for item in range(len(self._data.training_patients))]
            self.offer = self._offered(marks, weighted=False)
        return clipped

    def _released(self, local: RunningAmplitude, measured: AmplitudeStatistic) -> AmplitudeStatistic | None:
        """The statistic as far as the ledger of this site's releases lets it leave."""
        if self._site.simulated:
            return measured
        offer = self._offered(*marks_of(local, self._data))
        answer = release(self._site.state_root, offer, lambda: measured)
        self._state.save_once(RELEASES, answer.counts)
        if line := release_line(answer.outcome, answer.statistic, offer.limit):
            self._logger.log(logging.WARNING if answer.outcome == "withheld" else logging.INFO, line)
        return answer.statistic

    def _offered(self, marks: list[str], weighted: bool) -> Offer:
        data = self._data
        return Offer(
            task=self._experiment.task,
            run=self._state.run_id,
            statistic=self._described(),
            members=members_of(data.training_cases or data.training_patients, data.training_patients, marks),
            weighted=weighted,
            limit=self._site.minimum_cases,
        )

    def _described(self) -> dict[str, Any]:
        """What makes one statistic of one set: all that decides what is made of an image, and the noise."""
        settings, size, noise = self._experiment.amplitude, self._experiment.data, self._site.amplitude_noise
        reader = json.dumps(self._experiment.reader, sort_keys=True)
        described: dict[str, Any] = {
            "region": settings.region,
            "intensity": settings.intensity,
            "estimation": settings.estimation if noise is None else "clipped_mean",
            "channels": self._channels,
            "height": size.height,
            "width": size.width,
            "reader": hashlib.sha256(reader.encode()).hexdigest()[:16],
            "noise": None if noise is None else noise.model_dump(),
        }
        if settings.region == "low":
            described["low_fraction"] = settings.low_fraction
        if described["estimation"] == "running_mean":
            described["momentum"] = settings.momentum
        return described

    def _are_enough(self, patients: int, images: int | None = None) -> bool:
        needed = max(self._experiment.amplitude.minimum_cases, self._site.minimum_cases)
        if patients >= needed:
            return True
        counted = "" if images is None else f"{count_text(images, 'image')} of "
        self._logger.warning(
            f"amplitude not sent: {counted}{count_text(patients, 'training patient')}, {needed} needed; "
            "this site trains with the global one"
        )
        return False

    def _clipped(self, relative_clip: float) -> AmplitudeStatistic | None:
        """One pass over all training images, patient by patient; None where the mean would tell nothing or too much."""
        settings, size = self._experiment.amplitude, self._experiment.data
        center = clipping_center(
            settings.region,
            self._channels,
            size.height,
            size.width,
            settings.low_fraction,
            intensity=settings.intensity,
        )
        mean = ClippedMean(center, relative_clip, self._data.patient_count)
        normalization = build_normalization(self._experiment, self._channels)
        patients, order = self._data.training_patients, self._patient_by_patient()
        start = 0
        for images in self._images(Subset(self._data.training, order)):
            items = order[start : start + len(images)]
            start += len(images)
            unreadable = set(self._data.unreadable())  # another patient's image would stand in for it
            rows = [row for row, item in enumerate(items) if item not in unreadable]
            if rows:
                kept = images[rows]
                mean.add(normalization.statistics(kept), [patients[items[row]] for row in rows], has_contrast(kept))
        if not self._are_enough(mean.shown, mean.images) or self._all_clipped(mean, relative_clip):
            return None
        values, count = mean.result().numpy(), self._data.patient_count
        return AmplitudeStatistic(values, mean.images, count, mean.distance, relative_clip)

    def _all_clipped(self, mean: ClippedMean, relative_clip: float) -> bool:
        """Say at the site how many patients were clipped; whether it was every one that shows anything."""
        region, clipped, of = self._experiment.amplitude.region, mean.clipped, mean.moved
        told = (
            f"{clipped} of {of} patients were clipped at {relative_clip:g} of the scale of region {region} "
            f"(distance {mean.distance:.4g})"
        )
        fix = "raise relative_clip in local/privacy.json, which raises the noise as much"
        if clipped == of:
            self._logger.warning(f"amplitude not sent: {told}, so that it would hold the noise alone; {fix}")
        elif 2 * clipped > of:
            self._logger.warning(f"amplitude: {told}; {fix}")
        else:
            self._logger.info(f"amplitude: {told}")
        return clipped == of

    def _patient_by_patient(self) -> list[int]:
        """All training items, those of a patient in a row."""
        places: dict[Any, list[int]] = {}
        for item, patient in enumerate(self._data.training_patients):
            places.setdefault(patient, []).append(item)
        return [item for items in places.values() for item in items]


def patients_behind(local: RunningAmplitude, data: SiteData) -> int:
    """How many patients stand behind a mean of training images, in the channel in which they are fewest.

    An image that stands in for one that cannot be read is another patient's, and counts for nobody.
    """
    patients, unreadable = data.training_patients, set(data.unreadable())
    behind = [
        {patients[item] for item in row.nonzero().flatten().tolist() if item not in unreadable}
        for row in local.behind()
    ]
    return min(map(len, behind), default=0)


def marks_of(local: RunningAmplitude, data: SiteData) -> tuple[list[str], bool]:
    """What each training item weighs in a mean, as text that is empty for those not in it; whether weights differ.

    An item that another patient's image stands in for is marked as such: once it can be read the mean is another one.
    """
    weights = torch.zeros(local.weights.shape[0], len(data.training_patients), dtype=torch.float64)
    weights[:, : local.weights.shape[1]] = local.weights
    relative = weights / weights.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    weighted = bool(((relative > 0) & (relative < 1 - 1e-9)).any())
    unreadable = set(data.unreadable())
    marks = []
    for item, of_channels in enumerate(relative.T.tolist()):
        mark = ",".join(f"{weight:.6g}" for weight in of_channels) if any(of_channels) else ""
        marks.append(f"u{mark}" if mark and item in unreadable else mark)
    return marks, weighted


def release_line(outcome: Outcome, statistic: AmplitudeStatistic | None, limit: int) -> str:
    """What a site's log says about a statistic that was not released as measured; empty where it was."""
    if outcome == "new":
        return ""
    if outcome == "repeated":
        return "amplitude: this run or this set of patients had it before, so the same array is sent again"
    then = "that of an earlier set is sent again" if statistic is not None else "none is sent"
    return (
        f"amplitude not released: with what has left this site before it would tell about fewer than {limit} patients; "
        f"{then}, and new patients wait until enough have come (harmofl privacy shows the ledger)"
    )


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
