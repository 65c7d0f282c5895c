"""The inexact flag: read where it can be, and never trusted where it cannot."""

import ctypes

import numpy as np
import pytest

from harmofl.core.rounding import InexactFlag


@pytest.mark.parametrize("size", [1, 3, 8, 17, 1000, 100_000])
def test_one_rounded_sum_among_many_is_told(size):
    flag = InexactFlag()
    ones = np.ones(size)
    for place in {0, size // 2, size - 1}:
        added = np.full(size, 0.25)
        flag.clear()
        ones + added
        assert not flag.raised()
        added[place] = 2.0**-53  # 1 + 2^-53 needs 54 bits
        ones + added
        assert flag.raised()


def test_conversions_of_shorter_types_are_exact():
    flag = InexactFlag()
    halves, floats = np.arange(100, dtype=np.float16) / 7, np.arange(100, dtype=np.float32) / 7
    flag.clear()
    np.add(np.zeros(100), halves, out=np.empty(100))
    np.add(np.zeros(100), floats, out=np.empty(100))
    assert not flag.raised()


def test_numbers_that_are_none_round_nothing():
    flag = InexactFlag()
    held = np.full(100, np.nan)
    flag.clear()
    held + np.full(100, 0.1)
    assert not flag.raised()


def no_library(name):
    raise OSError("no library")


def without_the_functions(name):
    return object()


def says(raised):
    """A library whose flag stands as it is."""

    class Library:
        feclearexcept, fetestexcept = staticmethod(lambda mask: 0), staticmethod(lambda mask: raised)

    return lambda name: Library()


@pytest.mark.parametrize("library", [no_library, without_the_functions, says(0), says(32)])
def test_where_it_cannot_be_known_everything_counts_as_rounded(library, monkeypatch):
    monkeypatch.setattr(ctypes, "PyDLL", library)
    flag = InexactFlag()
    assert not flag.works
    flag.clear()
    assert flag.raised()
