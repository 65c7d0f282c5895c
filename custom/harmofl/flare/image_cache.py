"""Where a site keeps decoded images: a folder for the settings that decide them, of which the newest few stay."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from harmofl.experiment import Experiment

KEPT = 3  # settings: each is a copy of all images, and a job chooses them
_NAME = re.compile(r"[0-9a-f]{16}")


def image_cache(root: Path, experiment: Experiment) -> Path:
    """The folder for images as this experiment decodes them; those of other settings than the KEPT newest are removed.

    Else every job with another `data.height` would leave one more copy of all images of a hospital on its disk.

    Args:
        root: of the site's cache.
        experiment: what a job asks for.
    """
    data = experiment.data
    decides = [experiment.task, data.height, data.width, experiment.reader, experiment.amplitude.intensity == "none"]
    name = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    others = [path for path in root.iterdir() if path.name != name] if root.is_dir() else []
    settings = [path for path in others if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    for path in sorted(settings, key=_last_use, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(path, ignore_errors=True)  # another job may remove it too; what it has mapped stays readable
    for path in others:  # of versions that kept all in one folder
        if path.suffix in (".decoded", ".hashed"):
            path.unlink(missing_ok=True)
    if (root / name).is_dir():
        os.utime(root / name)
    return root / name


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0
