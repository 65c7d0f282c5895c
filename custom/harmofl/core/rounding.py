"""Whether the processor has rounded: the inexact flag of IEEE 754, which the C library lets a program read."""

import ctypes

import numpy as np

_ALL = 0x3F  # the flags have other places on other processors, all of them among these bits
_LENGTH = 1000  # NumPy takes most of so many elements by vector instructions, and some one by one


class InexactFlag:
    """Tells of NumPy's operations in this thread whether they were exact.

    Where that cannot be known, because no C library tells or NumPy itself lowers the flag, each is said to have
    rounded: whoever then looks closer loses time and nothing else.
    """

    def __init__(self) -> None:
        """Find the C library's functions, and try them."""
        self._mask = _ALL
        try:
            library = ctypes.PyDLL(None)  # what Python itself is linked with; it keeps the thread, which owns the flags
            self._clear, self._test = library.feclearexcept, library.fetestexcept
        except (OSError, AttributeError, TypeError):
            self.works = False
            return
        for function in (self._clear, self._test):
            function.argtypes, function.restype = [ctypes.c_int], ctypes.c_int
        self.works = self._tried()

    def clear(self) -> None:
        """Lower the flag."""
        if self.works:
            self._clear(self._mask)

    def raised(self) -> bool:
        """Whether an operation since `clear` has rounded."""
        return not self.works or self._test(self._mask) != 0

    def _tried(self) -> bool:
        """Find which flag it is, and whether it is raised by one rounded sum among many, and only then."""
        ones, total = np.ones(_LENGTH), np.empty(_LENGTH)
        exact = np.full(_LENGTH, 0.5, np.float32)
        answers = []
        for place in (None, 0, _LENGTH // 2, _LENGTH - 1):
            added = exact.astype(np.float64)
            if place is not None:
                added[place] = 2.0**-60
            self._clear(self._mask)
            np.add(ones, added, out=total)
            found = self._test(self._mask)
            if place == 0:
                self._mask = found or _ALL
            answers.append(found != 0)
        return answers == [False, True, True, True]
