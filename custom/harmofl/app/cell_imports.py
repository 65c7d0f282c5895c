"""What every cell of a comparison imports, loaded once by the process that all cells are forked from.

Importing torch, MONAI and FLARE takes longer than a cell of a small job spends on its data. Nothing here may ask for a
GPU or start a thread: a process that is forked afterwards could use neither.
"""

from importlib import import_module

import harmofl.app.explanation  # noqa: F401
import harmofl.flare.in_process  # noqa: F401
from harmofl.tasks import TASKS

# Imported elsewhere only where they are needed: tasks and networks by name, what draws the report.
for _module in (
    *(f"harmofl.tasks.{task}" for task in TASKS),
    "monai.networks.nets.basic_unet",
    "monai.networks.nets.densenet",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "jinja2",
):
    import_module(_module)
