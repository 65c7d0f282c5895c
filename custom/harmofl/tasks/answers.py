"""What a task answers about a site: its data, the scores of a split, a report on its folder."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from harmofl.core.classification import Estimate
    from harmofl.data.findings import Finding


@dataclass
class SiteData:
    """What a site's folder gives a task: a training set, what is scored, and what was found on the way.

    `cases` counts by training, validation and test what the task calls a case; `skipped` counts by code what is
    not used so far. Both leave the site; `findings`, and those met only later, which name files, do not.
    `training_patients` tells for each training item whose it is: how many differ decides whether an amplitude may be
    sent, and each patient's part is clipped where the site adds noise to it. `unreadable` names the training items that
    were found so far to be another's in their place. `training_cases` tells for each training item of which case it is,
    where that is more than whose it is: a rule that finds patients in names can change, the cases stay.
    """

    training: "Dataset[Any]"
    validation: Any
    test: Any
    findings: "list[Finding]"
    cases: dict[str, int]
    skipped: Callable[[], dict[str, int]]
    training_patients: Sequence[Hashable]
    late_findings: "Callable[[], list[Finding]]" = list
    unreadable: Callable[[], Sequence[int]] = tuple
    training_cases: Sequence[Hashable] = ()

    @property
    def patient_count(self) -> int:
        """Number of patients with a training item."""
        return len(set(self.training_patients))

    @property
    def warned(self) -> dict[str, int]:
        """Number of warnings by code, which leave the site as `skipped` does."""
        return dict(Counter(finding.code for finding in self.findings if finding.severity == "warning"))


@dataclass(frozen=True)
class TaskBounds:
    """What a site's answer about a task can hold; the server refuses what lies beyond.

    Attributes:
        fewest_images: training images that each case gives at least.
        most_images: training images that a case gives at most.
        scores: by name the largest value of each score, the smallest is 0; infinity for a distance. None where a task
            does not say: any name then, 0 or more.
        intensity: largest intensity of an image before the intensity step, the smallest is 0; None where the files
            decide.
    """

    fewest_images: int = 0
    most_images: int = 1_000_000
    scores: Mapping[str, float] | None = None
    intensity: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Scores of one split; no case is named.

    Attributes:
        key_score: the number that picks the best round; None where it is undefined.
        scores: by name one number a case, NaN where undefined.
        pooled: by name one number over all images of the split, where a score is no mean over cases.
        patients: of the cases in `scores`, in order, each patient by a number counted from 0: intervals take patients
            for their units. None where each case is of a patient of its own.
    """

    key_score: float | None
    scores: dict[str, list[float]]
    pooled: "dict[str, Estimate]" = field(default_factory=dict)
    patients: Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class Illustration:
    """A scored case or image as one picture. It holds no name, and is drawn only where the data lies.

    Attributes:
        image: as read, (H, W) gray or (H, W, 3) in [0, 1].
        score: of the whole case, in [0, 1]; NaN where undefined.
        note: which part of the case is shown, or what was predicted of it.
        reference: the true foreground, (H, W); None where an image is classified as a whole.
        predicted: the predicted foreground, (H, W).
    """

    image: NDArray[Any]
    score: float
    note: str
    reference: NDArray[np.bool_] | None = None
    predicted: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class FolderReport:
    """What a site's folder holds, for a person; it stays at the site.

    Attributes:
        columns: headings of the table.
        rows: the table, one row a case or group of cases.
        summary: one line below it.
        findings: about files, cases and the split.
        training_images: images of one epoch.
        validation_images: images scored in every round.
        training_patients: patients behind the amplitude.
        bytes_held: decoded images kept in memory.
        pixels: by case the height and width in mm of a pixel at the experiment's size, where the files tell.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    summary: str
    findings: "tuple[Finding, ...]"
    training_images: int
    validation_images: int
    training_patients: int
    bytes_held: int
    pixels: dict[str, tuple[float, float]] = field(default_factory=dict)
