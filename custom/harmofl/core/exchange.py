"""The types in which a model's entries travel: float16 both ways, with a float32 model at the server.

One rule for both ways, by the kind of an entry and never by its values, so that each side knows the type of every entry
before it looks into a message:

- parameters are rounded to the nearest float16, ties to even: by at most 2^-11 of a number from 2^-14 (6.1e-5) on, and
  by at most 2^-25 (3.0e-8) below, where numbers of up to 2^-25 become 0. From 65520 on there is no float16, and nothing
  is sent;
- running means and variances keep float32: those of activations can lie beyond 65504, and the change of a variance that
  falls to nearly 0 would be rounded beyond the variance, to one below 0;
- counters and other integers keep their type.

What the rounding does on the way down. Let M be the server's float32 model, R = M + e what all sites receive, |e| at
most the bound above, and d the mean difference, which every site measures from R. The server's rule moves M:

    M' = M + eta d        so that after T rounds    M_T = M_0 + eta (d_0 + ... + d_{T-1})

No e is in this sum: rounding errors do not accumulate, and changes far below a step of float16 add up in M until R
takes the step (the float32 master copy of Micikevicius et al., ICLR 2018, section 3.1). Seen from the sites it is error
feedback (Karimireddy et al., ICML 2019): R' is M' rounded, and M' = R + eta d - e gives back what the rounding before
took, so that R_T - R_0 = eta (d_0 + ... + d_{T-1}) + e_T - e_0, two roundings off whatever the number of rounds.

The update is that of R and not of M: d(R) = d(M) + (d(M + e) - d(M)), a bias of at most L |e|, where L is the Lipschitz
constant of what a round adds. It does not grow with the rounds. Where a round leads from every start to the same W,
d = W - R and M' = W - e for eta = 1: one rounding off, once. Were R moved instead, R' = R + eta d rounded, each round
would add an e of its own to the model, and a change below half a step would be lost in every round: 1e-5 of a weight of
1, whose half step is 4.9e-4, for ever.
"""

from collections.abc import Mapping

import numpy as np

from harmofl.core.direction import all_finite

Arrays = Mapping[str, np.ndarray]

LARGEST = 65504  # of float16
_HALF = np.dtype(np.float16)


class BeyondFloat16Error(ValueError):
    """An entry has a number that float16 has not.

    Attributes:
        name: of the entry.
        largest: its largest magnitude.
    """

    def __init__(self, name: str, largest: float) -> None:
        super().__init__(f"{name} reaches {largest:.3g}, float16 ends at {LARGEST}")
        self.name, self.largest = name, largest


def exchange_types(entries: Arrays, exchange: str, statistics: frozenset[str]) -> dict[str, np.dtype[np.generic]]:
    """By name the type in which an entry travels.

    Args:
        entries: name -> array, float entries in float32.
        exchange: `federation.exchange`.
        statistics: running means and variances (`Partition.statistics`).
    """
    halves = exchange == "float16"
    return {
        name: _HALF if halves and value.dtype.kind == "f" and name not in statistics else value.dtype
        for name, value in entries.items()
    }


def to_exchange_types(entries: Arrays, exchange: str, statistics: frozenset[str]) -> dict[str, np.ndarray]:
    """Entries as they travel; those whose type stays are the same arrays. The arguments are those of `exchange_types`.

    Raises:
        BeyondFloat16Error: a number rounds to none that float16 has.
    """
    types = exchange_types(entries, exchange, statistics)
    sent: dict[str, np.ndarray] = {}
    for name, kind in types.items():
        value = np.asarray(entries[name])
        with np.errstate(over="ignore"):
            sent[name] = value.astype(kind, copy=False)
        if kind != value.dtype and not all_finite(sent[name].reshape(-1), _HALF):
            raise BeyondFloat16Error(name, float(np.abs(value).max()))
    return sent


def from_exchange_types(entries: Arrays) -> dict[str, np.ndarray]:
    """Entries as they are computed with: float16 ones as float32, which has all their numbers."""
    return {name: value.astype(np.float32) if value.dtype == _HALF else value for name, value in entries.items()}
