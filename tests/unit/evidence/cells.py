"""Finished cells without a run, for whatever compares them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from harmofl.app.grid import Sweep, variations
from harmofl.evidence.comparison import CellKey, CellRecord, DriftRecord, Landscape, LocalCurves, SiteScores, Use
from harmofl.evidence.comparison_summary import GridResult
from harmofl.evidence.results import ScoreSummary
from harmofl.experiment import Experiment, resolve

CASES = (-0.04, 0.0, 0.04)  # of a site's cases around its mean


def summary(mean: float | None, width: float = 1.0) -> ScoreSummary:
    cases: list[float | None] = [None if mean is None else mean + width * offset for offset in CASES]
    count = 3 * (mean is not None)
    return ScoreSummary(mean=mean, low=None, high=None, n=count, undefined=0, patients=count, per_case=cases)


def record(use: Use, sites: Mapping[str, float | None], **changed: Any) -> CellRecord:
    """A cell whose last model is 0.1 worse than its best one; the cases of `harmofl` differ 1.5 times as much."""
    experiment = changed.pop("experiment")
    line: list[float | None] = [0.3, 0.1, 0.2]
    landscape = Landscape(
        offsets=[-0.25, 0.0, 0.25],
        surface=[[0.5, 0.4, 0.5], [0.3, 0.1, 0.3], [0.5, 0.4, None]],
        local={site: LocalCurves(own_images=line, all_images=0.35) for site in sites},
        sharpness=0.25,
        sharpness_at=0.25,
        images=8,
    )
    width = 1.5 if use.method == "harmofl" else 1.0
    scores = {
        site: SiteScores(
            best={"dice": summary(mean, width)}, final={"dice": summary(None if mean is None else mean - 0.1)}
        )
        for site, mean in sites.items()
    }
    settings: dict[str, Any] = {
        "format": 2,
        "key": CellKey(
            experiment_hash="0" * 16, version="0.1.0", data="demo", sites=sorted(sites), left_out=use.left_out
        ),
        "experiment": experiment.model_dump(mode="json"),
        "method": use.method,
        "seed": use.seed,
        "demo": True,
        "key_score": "dice",
        "score_note": "foreground Dice",
        "seen": sorted(site for site in sites if site != use.left_out),
        "best_round": 1,
        "scores": scores,
        "validation": [0.1, 0.5, None],
        "drift": [DriftRecord(dispersion=2.0, relative=1.5, cosine=0.25)] * 2,
        "amplitude_distance": {"as read": 0.5, "as trained on": 0.25},
        "landscape": landscape,
        "test_over_training": 0.3125,
        "passes": 120,
        "seconds": 12.5,
    }
    return CellRecord.model_validate(settings | changed)


def grid(
    written: dict[str, Any],
    methods: Sequence[str],
    seeds: Sequence[int],
    score: Callable[[Use, str], float | None],
    *,
    sweeps: Sequence[Sweep] = (),
    left_out: Sequence[str] = (),
    missing: Callable[[Use], bool] = lambda use: False,
    modelless: Collection[str] = (),
    controls: Mapping[str, str] | None = None,
    sites: Sequence[str] = ("A", "B"),
    of_cell: Callable[[Use], dict[str, Any]] = lambda use: {},
    **changed: Any,
) -> GridResult:
    """A grid in which `score` says how each use scores at each site; `of_cell` changes a use's record."""
    experiment: Experiment = resolve(written)
    uses, records = [], {}
    asked = variations(methods, seeds, sweeps, left_out)
    for number, use in enumerate(use for use in asked if not (use.left_out and use.method in modelless)):
        name = f"cell{number}"
        uses.append(use.model_copy(update={"cell": name}))
        if not missing(use):
            scores = {site: score(use, site) for site in sites}
            records[name] = record(use, scores, **({"experiment": experiment} | changed | of_cell(use)))
    return GridResult(
        uses=uses,
        records=records,
        fixed={sweep.key: ("fedavg",) for sweep in sweeps},
        controls=controls or {},
        failed={},
        own_method="harmofl",
        base=experiment,
        assignments=(),
        seconds=60.0,
    )
