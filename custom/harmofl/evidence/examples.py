"""Which scored cases a page shows of a site: the best, the median and the worst one."""

from collections.abc import Sequence
from math import isnan

from harmofl.data.findings import count_text
from harmofl.evidence.results import ScoreSummary
from harmofl.tasks.answers import Illustration

ALIKE = 0.02  # on another device a score moves by less


def best_median_worst(cases: Sequence[Illustration]) -> tuple[tuple[str, Illustration], ...]:
    """The pictures to show with their titles; undefined scores are no examples, one case is shown once."""
    ordered = sorted((case for case in cases if not isnan(case.score)), key=lambda case: -case.score)
    if len(ordered) == 1:
        return (("the only one", ordered[0]),)
    if len(ordered) == 2:
        return (("best", ordered[0]), ("worst", ordered[1]))
    return (("best", ordered[0]), ("median", ordered[len(ordered) // 2]), ("worst", ordered[-1])) if ordered else ()


def disagreement(cases: Sequence[Illustration], recorded: ScoreSummary | None) -> str:
    """What to say where the cases' scores are not those that the run recorded, empty where they are."""
    if recorded is None or not recorded.per_case:
        return ""
    if len(cases) != len(recorded.per_case):
        return (
            f"Careful: the run tested {count_text(len(recorded.per_case), 'case')} here, this folder "
            f"gives {len(cases)}. The data "
            "has changed since, so these pictures are not of the scores above."
        )
    pairs = zip((case.score for case in cases), recorded.per_case, strict=True)
    off = [f"{now:.3f} for {then:.3f}" for now, then in pairs if then is not None and not abs(now - then) <= ALIKE]
    if not off:
        return ""
    return (
        f"Careful: of {count_text(len(cases), 'case')} {len(off)} with another score than in the run "
        f"({off[0]}), so the data, the model "
        "or the software differs."
    )
