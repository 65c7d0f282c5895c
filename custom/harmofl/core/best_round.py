"""Which of two models counts as the better one where not every site scored both."""

import math
from collections.abc import Mapping


def scores_higher(model: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Whether a model scores higher than the best one so far, on average over the sites that scored both.

    Means over different sites tell nothing: without a site where all models score low, any model's mean is higher.

    Args:
        model: by site its validation score, of the sites that have one.
        best: those of the best model so far; empty where there is none.

    Returns:
        True for the first model that a site scored; False for equal scores and where no site scored both, so that the
        earlier model stays.
    """
    if not best:
        return bool(model)
    # fsum rounds once, so that the order of the sites changes nothing; without a common site both sums are 0
    both = model.keys() & best.keys()
    return math.fsum(model[site] for site in both) > math.fsum(best[site] for site in both)
