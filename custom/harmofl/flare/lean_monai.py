"""MONAI in a process of a site, without the packages that it loads only because they are installed."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType

# MONAI imports all of its modules at once, and these where it finds them: two seconds in each process of a site. What
# the package's own tasks use (networks, losses, metrics, resizing, readers, sliding windows) needs none of them.
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


def import_lean_monai() -> None:
    """Import MONAI, if nothing has yet, so that it takes the packages named above for not installed.

    For processes that run a task of the package and nothing else: parts of MONAI that need one of these packages say
    from then on that it is missing. Everybody else imports them as ever.
    """
    if "monai" in sys.modules:
        return
    finder = _NotFound()
    sys.meta_path.insert(0, finder)
    try:
        import_module("monai")
    finally:
        sys.meta_path.remove(finder)
