"""What a comparison says in sentences: the answer first, then how sure it is and why."""

from collections.abc import Sequence

from harmofl.core.clustered import FEWEST
from harmofl.evidence.comparison import Comparison, Difference, LeftOut, MethodSummary, Spread, Verdict

VERDICTS: dict[Verdict, str] = {
    "reference": "reference",
    "better": "better",
    "worse": "worse",
    "unclear": "not sure: among so many comparisons it may be chance",
    "no_evidence": "no evidence of a difference",
    "no_spread": "not sure: no spread over the seeds, so it cannot be distinguished from chance",
    "same": "the same to the last bit",
    "few_seeds": "not sure: fewer than three seeds say next to nothing about training again",
    "no_scores": "no scores to compare",
    "no_model": "has no model for a hospital that took no part",
}
MORE = 1.05  # times the passes that are worth a word
_INTENSITIES = {"zscore": "z-score", "window": "windowed intensities", "none": "raw intensities"}
_SHORT = {
    "better": "better",
    "worse": "worse",
    "unclear": "not sure",
    "no_spread": "no spread over the seeds",
    "no_evidence": "no evidence of a difference",
}


def headline(comparison: Comparison, own_method: str) -> str:
    """Which method, by how much, how sure, in one sentence."""
    rows = {row.method: row for row in comparison.methods}
    reference, key = rows[comparison.reference], comparison.key_score
    told = _told(comparison, own_method)
    if told is None or told.difference is None:
        held = f", standard deviation {_number(reference.mean.deviation)}" if reference.mean.n > 1 else ""
        return (
            f"{reference.method} scores {_number(reference.mean.mean)} in {key}{held}, over {_seeds(reference.mean.n)}."
        )
    name = f"{comparison.reference}{_intensity(comparison)}"
    start = f"{told.method} scores {_number(told.mean.mean)}, {name} {_number(reference.mean.mean)} in {key}"
    return f"{start}: {difference_text(told.difference)}: {VERDICTS[told.verdict]}."


def difference_text(difference: Difference) -> str:
    """`difference +0.003, 95 % interval -0.010 to +0.016 over 3 seeds`."""
    if difference.mean is None:
        return "no difference can be given"
    text = f"difference {difference.mean:+.3f}"
    if difference.low is not None and difference.high is not None:
        return f"{text}, 95 % interval {difference.low:+.3f} to {difference.high:+.3f} over {_seeds(difference.pairs)}"
    if difference.patients_low is not None and difference.patients_high is not None:
        text += f", 95 % interval over patients {difference.patients_low:+.3f} to {difference.patients_high:+.3f}"
    return f"{text} with {_seeds(difference.pairs)}"


def findings(comparison: Comparison, own_method: str) -> list[str]:
    """What to know beside the headline, most important first."""
    told = _told(comparison, own_method)
    lines = [_others(comparison, told), _sureness(told), _compute(comparison), *_unseen(comparison, told)]
    lines += [_why(comparison, told)]
    lines += [_other_network(row) for row in comparison.methods if row.method not in _controls(comparison)]
    return [line for line in lines if line]


def statistics_sentence(comparison: Comparison, overlap: float) -> str:
    """How the intervals came about, and why so."""
    seeds = len(comparison.seeds)
    text = (
        "Differences are paired by seed: a seed gives all methods the same cases, split, initial weights and order of "
        "images."
    )
    if seeds >= FEWEST:
        text += (
            f" The interval is Student's t over the {_seeds(seeds)} of the mean over sites, not a bootstrap over "
            "seeds, which with so few is far too narrow. The p values are corrected for all differences that are "
            "judged (Holm); better or worse is said where the corrected one is below 0.05."
        )
    text += (
        " The interval over patients adds up the variances of the sites' test patients (degrees of freedom of "
        "Satterthwaite) and says how far other patients would move the difference between these trained models, "
        "nothing about training them again. There is none where a site tests a single patient."
    )
    if seeds < FEWEST:
        return f"{text} Fewer than {FEWEST} seeds give no interval over seeds and no p value: run {FEWEST} or more."
    if overlap:
        return text + (
            " Seeds split the same patients anew, so that their differences are correlated: the variance is raised by "
            f"test over training cases, here {overlap:.2f} (Nadeau and Bengio 2003)."
        )
    return text + " Every seed draws synthetic patients of its own."


def _told(comparison: Comparison, own_method: str) -> MethodSummary | None:
    """The method that the headline is about: the job's own, else the best of those that are not the reference."""
    beside = {comparison.reference, *_controls(comparison)}
    others = [row for row in comparison.methods if row.method not in beside]
    own = next((row for row in others if row.method == own_method), None)
    return own or max(others, key=lambda row: row.mean.mean if row.mean.mean is not None else -1.0, default=None)


def _others(comparison: Comparison, told: MethodSummary | None) -> str:
    rows = [row for row in comparison.methods if row.method != comparison.reference]
    if told is None or len(rows) < 2:
        return ""
    by_verdict: dict[str, list[str]] = {}
    for row in rows:
        held = row.difference.mean if row.difference else None
        said = f"{row.method} {held:+.3f}" if held is not None else row.method
        by_verdict.setdefault(_SHORT.get(row.verdict, VERDICTS[row.verdict]), []).append(said)
    parts = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in by_verdict.items())
    best = max(comparison.methods, key=lambda row: row.mean.mean if row.mean.mean is not None else -1.0)
    return f"Against {comparison.reference}: {parts}. Highest mean: {best.method}, {_number(best.mean.mean)}."


def _sureness(told: MethodSummary | None) -> str:
    held = told.difference if told else None
    if held is None or held.low is None or held.high is None or told is None or told.verdict == "same":
        return ""
    half = (held.high - held.low) / 2
    return f"With {_seeds(held.pairs)} a difference below about {half:.3f} cannot be told from chance."


def _unseen(comparison: Comparison, told: MethodSummary | None) -> list[str]:
    rows: dict[str, LeftOut] = {row.method: row for row in comparison.left_out}
    lines = [f"{row.method} {VERDICTS['no_model']}." for row in rows.values() if row.verdict == "no_model"]
    row, reference = rows.get(told.method) if told else None, rows.get(comparison.reference)
    if row is None or reference is None or row.difference is None or row.difference.mean is None:
        return lines
    return [
        f"At hospitals that took no part {row.method} scores {_number(row.mean.mean)}, {reference.method} "
        f"{_number(reference.mean.mean)}: {difference_text(row.difference)}: {VERDICTS[row.verdict]}.",
        *lines,
    ]


def _compute(comparison: Comparison) -> str:
    """A higher score at more compute is not yet a better method: which ones that is said of, and what would show it."""
    reference = next(row for row in comparison.methods if row.method == comparison.reference)
    higher, lower = [], []
    for row in comparison.methods:
        times, gain = times_the_passes(row, reference), row.difference.mean if row.difference else None
        if times is None or not gain:
            continue
        if gain > 0 and times >= MORE:
            higher.append((row.method, times))
        elif gain < 0 and 1 / times >= MORE:
            lower.append((row.method, 1 / times))
    told = [f"{method} scores higher at {times:.1f} times the passes of {reference.method}" for method, times in higher]
    told += [f"{reference.method} scores higher at {times:.1f} times the passes of {method}" for method, times in lower]
    if not told:
        return ""
    return f"Unequal compute: {'; '.join(told)}{_at_equal_compute(comparison, higher)}."


def _at_equal_compute(comparison: Comparison, higher: Sequence[tuple[str, float]]) -> str:
    """The option that gives the reference as many passes, where whole epochs do."""
    epochs = comparison.experiment["training"]["local_epochs"]
    asked = [f"{epochs * times:.0f}" for _, times in higher if abs(epochs * times - round(epochs * times)) < 0.01]
    if not asked:
        return ""
    values = ",".join(dict.fromkeys(asked))
    return f" (--sweep training.local_epochs={epochs},{values} shows {comparison.reference} with as many)"


def times_the_passes(row: MethodSummary, reference: MethodSummary) -> float | None:
    """Forward-backward passes over those of the reference, None where either has none."""
    return row.passes.mean / reference.passes.mean if row.passes.mean and reference.passes.mean else None


def _why(comparison: Comparison, told: MethodSummary | None) -> str:
    """What the method is meant to change, beside the same numbers of the reference."""
    if told is None:
        return ""
    reference = next(row for row in comparison.methods if row.method == comparison.reference)
    parts = []
    steps = list(told.amplitude_distance)
    if steps and told.amplitude_distance[steps[-1]].mean is not None:
        after, before = told.amplitude_distance[steps[-1]], reference.amplitude_distance.get(steps[-1])
        parts.append(f"amplitude distance between sites {_beside(after, before)}")
    if told.drift and reference.drift:
        parts.append(
            f"client drift in the last round {_beside(told.drift[-1], reference.drift[-1])} of the mean update"
        )
    if told.sharpness.n and reference.sharpness.n:
        parts.append(f"rise of the loss around the model {_beside(told.sharpness, reference.sharpness)}")
    return f"Why, {told.method} against {reference.method}: {'; '.join(parts)}." if parts else ""


def _controls(comparison: Comparison) -> set[str]:
    return {row.control.name for row in comparison.methods if row.control}


def _other_network(row: MethodSummary) -> str:
    """A method that needs another network is not the only thing that differs from the reference."""
    held = {key: value for key, value in row.settings.items() if key.startswith("network.")}
    if not held:
        return ""
    said = ", ".join(f"{key}={value}" for key, value in held.items())
    start = f"{row.method} also has another network, {said}"
    if row.control is None:
        return f"{start}: compare with --set {said} to see the method alone."
    held_against = f"{start}; against {row.control.name}, which has it too"
    return f"{held_against}: {difference_text(row.control.difference)}: {VERDICTS[row.control.verdict]}."


def _beside(one: Spread, other: Spread | None) -> str:
    return f"{_number(one.mean)} against {_number(other.mean if other else None)}"


def _intensity(comparison: Comparison) -> str:
    """What plain averaging has in common with the paper's method, which decides more than the method does."""
    intensity = comparison.experiment.get("amplitude", {}).get("intensity")
    return f" with {_INTENSITIES[intensity]}" if intensity in _INTENSITIES else ""


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"
