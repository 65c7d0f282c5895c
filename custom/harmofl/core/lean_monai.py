"""MONAI without the packages that it loads only because they are installed."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType

# MONAI imports all of its modules at once, and these where it finds them: two seconds in each process of a site. What
# is used here (networks, losses, metrics, resizing, readers, sliding windows) needs none of them.
NOT_NEEDED = ("matplotlib", "scipy.signal", "scipy.stats", "skimage", "tensorboard", "requests", "jsonschema")


class _NotFound(MetaPathFinder):
    """Finds none of these packages for the thread that made it; other threads import as ever."""

    def __init__(self) -> None:
        self._thread = get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse what is not needed, and leave the rest to Python's own finders."""
        if fullname in NOT_NEEDED and get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


@contextmanager
def lean_monai() -> Iterator[None]:
    """Let the first import of MONAI in this process, inside the block, find none of the packages named above.

    MONAI takes them for not installed from then on; everybody else imports them as ever. What is already loaded stays.
    """
    if "monai" in sys.modules:
        yield
        return
    finder = _NotFound()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
