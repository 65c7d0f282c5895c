"""Which sets of patients may be released beside earlier ones: what sums over sets reveal together.

A released mean times its number of images is a sum over a set of patients. Whoever has several such sums can form every
linear combination of them, and a combination in which few patients are left tells about those few: two sums whose sets
differ by one patient are that patient's own. So what is bounded is the number of patients in any combination, which for
two sets is their symmetric difference: both patients who came and patients who went are left in it, with signs that
hide nothing.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MOST_SUBSETS = 4000  # beyond, a set is taken for one that reveals few
# One patient's part of a sum -> the patient. The same patient with other images is another part of the same patient.
ReleasedSet = Mapping[Hashable, Hashable]


def reveals_few(released: Sequence[ReleasedSet], offered: ReleasedSet, limit: int) -> bool:
    """Whether a further sum makes a linear combination known in which fewer than `limit` patients are left.

    Combinations of the earlier sums alone are known already and do not count. A sum that follows from the earlier ones
    reveals nothing. Exact but for its bound: where there are too many subsets of few patients to look at, it is true.

    Args:
        released: the earlier sets.
        offered: the further one.
        limit: fewest patients behind anything that may be known.
    """
    rows = list({frozenset(part) for part in released}) + [frozenset(offered)]
    patient_of: dict[Hashable, Hashable] = {}
    for part in (*released, offered):
        patient_of.update(part)
    groups: dict[tuple[bool, ...], set[Hashable]] = {}
    for column, patient in patient_of.items():
        groups.setdefault(tuple(column in row for row in rows), set()).add(patient)
    # patients of one group have the same coefficient in every combination
    matrix = np.array(list(groups), np.float64).T
    if _rank(matrix) == _rank(matrix[:-1]):
        return False
    small = {index: patients for index, patients in enumerate(groups.values()) if len(patients) < limit}
    for looked_at, subset in enumerate(_subsets(list(small.items()), set(), limit)):
        if looked_at == MOST_SUBSETS:
            return True
        others = [index for index in range(len(groups)) if index not in subset]
        if _within(matrix, others) > _within(matrix[:-1], others):
            return True
    return False


def patients_between(one: ReleasedSet, other: ReleasedSet) -> int:
    """How many patients two sets differ by, in either direction."""
    return len({(one.get(part) or other.get(part)) for part in one.keys() ^ other.keys()})


def _within(matrix: NDArray[np.float64], others: list[int]) -> int:
    """Dimension of the combinations that are 0 in all these columns."""
    return _rank(matrix) - _rank(matrix[:, others])


def _rank(matrix: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(matrix)) if matrix.size else 0


def _subsets(
    groups: list[tuple[int, set[Hashable]]], patients: set[Hashable], limit: int, chosen: frozenset[int] = frozenset()
) -> Iterator[frozenset[int]]:
    """All non-empty subsets of groups that hold fewer than `limit` patients together."""
    for position, (index, members) in enumerate(groups):
        together = patients | members
        if len(together) < limit:
            yield chosen | {index}
            yield from _subsets(groups[position + 1 :], together, limit, chosen | {index})
