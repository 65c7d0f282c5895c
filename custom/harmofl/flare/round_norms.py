"""What the server notes of the differences of a round: norms, outliers, and who pulled where when a score falls."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from harmofl.core.contributions import ContributionError
from harmofl.core.direction import cosine_to_rest
from harmofl.core.norm_rule import usual_norm, usual_steps
from harmofl.core.server_rules import RoundMean
from harmofl.evidence.results import RoundRecord
from harmofl.flare.relay_message import GatheredAnswers, RoundMeasure
from harmofl.flare.server_run import ServerRun
from harmofl.flare.wire import UpdateMessage
from harmofl.sections import outside_text

FALL, LEAST_FALL = 0.2, 0.05  # of the score before, and of the score's scale: less comes and goes between rounds
AWAY = -0.1  # a cosine below this points away; projections tell it within about 0.1


def open_round(run: ServerRun, weights: Mapping[str, Any]) -> RoundMean:
    """The mean of a round that begins with these weights, with the norms of the round before as its measure.

    They come from the run's record, so that a resumed run uses those of the round that was saved last.
    """
    measure = round_measure(run)
    return run.rule.open_round(weights, measure.usual, usual_steps=measure.usual_steps, first=measure.first)


def round_measure(run: ServerRun) -> RoundMeasure:
    """Norms and steps with which the server and relays compare the next round's differences."""
    last = run.rounds[-1] if run.rounds else None
    # what was added, and not what was sent: a norm that was scaled once must not widen the next round's limit
    added = [norm * last.scaled.get(site, 1.0) for site, norm in last.norm.items()] if last else []
    steps = usual_steps([last.steps[site] - last.skipped_steps[site] for site in last.norm]) if last else None
    return RoundMeasure(usual=usual_norm(added), usual_steps=steps, first=last is None)


def merge_partial(mean: RoundMean, gathered: GatheredAnswers, run: ServerRun) -> None:
    """Check the sum that a relay made of its sites' differences and add it; note what the relay has measured of each.

    Raises:
        ContributionError: see `RoundMean.merge`; also a sum of other sites or weights than those that came with it.
    """
    updates, partial = gathered.updates, gathered.partial
    if partial is None or partial.count != len(updates):
        told = 0 if partial is None else partial.count
        raise ContributionError(
            f"a sum of {outside_text(told)} differences came with the numbers of {len(updates)} sites"
        )
    weight = sum(contribution_weight(update, run) for update in updates.values())
    if partial.weight != weight:
        raise ContributionError(f"the sum has weight {outside_text(partial.weight)}, its sites have {weight} together")
    sent = {site: notes.sent() for site, notes in gathered.notes.items()}
    if missing := [site for site, held in sent.items() if held is None]:
        raise ContributionError(f"the relay does not tell the norm of {outside_text(missing[0])}")
    mean.merge(partial, [taken_steps(update) for update in updates.values()])
    for site, held in sent.items():
        assert held is not None
        run.sent[site] = held
        cosine = gathered.notes[site].cosine
        if cosine is not None:
            run.relay_cosine[site] = round(cosine, 3)


def add_difference(mean: RoundMean, site: str, update: UpdateMessage, run: ServerRun) -> str:
    """Check a site's difference and add it, scaled where the run bounds norms.

    Returns:
        Why it is an outlier, in one line; empty where it is none.

    Raises:
        ContributionError: see `RoundMean.add`; also numbers that tell too little.
    """
    assert update.difference is not None
    sent = mean.add(update.difference, contribution_weight(update, run), taken_steps(update))
    run.sent[site] = sent
    return sent.note


def taken_steps(update: UpdateMessage) -> int:
    """How many training steps moved the weights; `harmofl.flare.claims` has held them against the site's images."""
    return int(update.numbers.get("steps", 0)) - int(update.numbers.get("skipped_steps", 0))


def contribution_weight(update: UpdateMessage, run: ServerRun) -> int:
    """1 for every site (the paper's tables), or its number of training images.

    Raises:
        ContributionError: it tells no such number.
    """
    return 1 if run.experiment.federation.weights == "uniform" else _images(update)


def _images(update: UpdateMessage) -> int:
    images = update.numbers.get("images")
    if isinstance(images, bool) or not isinstance(images, int) or images < 1:
        raise ContributionError(f"number of training images is {images!r}")
    return images


def norms_of_round(run: ServerRun, accepted: list[str], validation: Mapping[str, float | None]) -> dict[str, Any]:
    """The entries of a round's record about differences; what is kept of them for the round ends here.

    Args:
        run: before the round's record is among its own.
        accepted: sites of the round.
        validation: by site the score of the model that the round began with.
    """
    sent = {site: run.sent[site] for site in accepted if site in run.sent}
    run.sent.clear()
    cosines = {site: run.relay_cosine[site] for site in accepted if site in run.relay_cosine}
    run.relay_cosine.clear()
    return {
        "norm": {site: held.norm for site, held in sent.items()},
        "scaled": {site: held.factor for site, held in sent.items() if held.factor < 1},
        "outliers": {site: held.note for site, held in sent.items() if held.note},
        "cosine": cosine_to_rest({site: held.direction for site, held in sent.items()}) | cosines,
        "fall": fall_line(run, validation),
    }


def fall_line(run: ServerRun, validation: Mapping[str, float | None]) -> str:
    """What is known of a sharp fall of the validation score since the last round that scored; empty where it did not.

    Scores are compared over the sites that have both; it falls sharply by a fifth and by 0.05.
    """
    since = _since_last_score(run)
    if not since:
        return ""
    last = since[0]
    both = sorted(site for site, score in validation.items() if score is not None and _before(last, site) is not None)
    if not both:
        return ""
    before = math.fsum(last.validation[site] or 0.0 for site in both) / len(both)
    after = math.fsum(validation[site] or 0.0 for site in both) / len(both)
    if before - after < max(LEAST_FALL, FALL * before):
        return ""
    # where scores lie several rounds apart, any of these rounds may have made the model worse
    several = len(since) > 1
    away = sorted(
        (cosine, site, record.round) for record in since for site, cosine in record.cosine.items() if cosine < AWAY
    )
    pulled = ", ".join(
        f"{site} (cosine {cosine:.2f}{f' in round {number}' if several else ''})" for cosine, site, number in away
    )
    who = (
        f"the differences of these sites point away from the rest: {pulled}"
        if away
        else ("no site's difference points away from the rest")
    )
    outliers = "".join(
        f"; {site}{f' in round {record.round}' if several else ''}: {note}"
        for record in since
        for site, note in record.outliers.items()
    )
    kept = f"; the best model, of round {run.best_round}, stays" if run.best_round is not None else ""
    rounds = f"rounds {last.round} to {since[-1].round}" if several else f"round {last.round}"
    return f"validation fell from {before:.3f} to {after:.3f} with {rounds}: {who}{outliers}{kept}"


def _since_last_score(run: ServerRun) -> list[RoundRecord]:
    """The closed rounds from the last one whose received model the sites were to score; with every round one."""
    numbers = [index for index, record in enumerate(run.rounds) if run.experiment.federation.validates(record.round)]
    return run.rounds[numbers[-1] :] if numbers else []


def _before(record: RoundRecord, site: str) -> float | None:
    return record.validation.get(site)


def outlier_reasons(run: ServerRun) -> str:
    """The outliers of the last closed round, for a line about what went wrong after it; empty without any."""
    if not run.rounds or not run.rounds[-1].outliers:
        return ""
    last = run.rounds[-1]
    return f"; outliers of round {last.round}: " + "; ".join(f"{site}: {note}" for site, note in last.outliers.items())


def round_warnings(record: RoundRecord) -> list[str]:
    """One line for each outlier of a round, and one about a fall of the score."""
    lines = [f"{site} is an outlier: {note}" for site, note in record.outliers.items()]
    return [f"round {record.round}: {line}" for line in [*lines, *([record.fall] if record.fall else [])]]


def run_warnings(run: ServerRun) -> list[str]:
    """What a reader of the scores must know: who was an outlier when, and when the score fell."""
    rounds: Counter[str] = Counter()
    first: dict[str, str] = {}
    falls = []
    for record in run.rounds:
        for site, note in record.outliers.items():
            rounds[site] += 1
            first.setdefault(site, f"round {record.round}: {note}")
        falls += [record.fall] if record.fall else []
    lines = [
        f"{site}: an outlier in {held} of {len(run.rounds)} rounds (first: {first[site]})"
        for site, held in sorted(rounds.items())
    ]
    return [*lines, *falls]
