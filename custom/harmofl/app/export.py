"""`harmofl export`: the model with its amplitude step for other programs, checked against this one."""

import copy
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harmofl.app import apply_exported
from harmofl.app.console import plain_console
from harmofl.app.export_bundle import write_bundle
from harmofl.app.export_folder import SETTINGS, check_place, put_in_place, write_code
from harmofl.app.export_readme import readme
from harmofl.app.job import JobError
from harmofl.app.model_file import LoadedModel
from harmofl.app.profile import hospital_profile
from harmofl.tasks.prostate import volume_settings
from harmofl.tasks.single_images import class_names, image_use

TOLERANCE = 1e-4  # largest difference of a probability
LARGEST_BATCH = 4096
ONNX_NEEDS = ("onnx", "onnxscript", "onnxruntime")
OPERATORS = "torch.onnx._internal.exporter._registration"  # the logger that names operators which are not there
FILES = {"torchscript": "model.ts", "onnx": "model.onnx", "monai-bundle": "model.ts"}


def export(model: LoadedModel, output: Path, form: str, *, profile_of: Path | None = None, force: bool = False) -> int:
    """Write the model into a new folder and compare its answers with those of this program.

    Returns:
        1 where a probability differs by more than 0.0001, in which case nothing is left, else 0.

    Raises:
        JobError: something is there that is not replaced, or a package is missing.
    """
    console = plain_console()
    console.print(model.label)
    check_place(output, force=force)
    own = hospital_profile(model, profile_of, console.print)
    graph = ExportedGraph(model, own)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as folder:
        made = Path(folder) / output.name
        difference = _write(graph, form, made)
        console.print(f"largest difference of a probability against this program: {difference:.1e}")
        if difference > TOLERANCE:
            console.print(f"not exported: more than {TOLERANCE:g} apart")
            return 1
        put_in_place(made, output)
    page = (output / "docs" if form == "monai-bundle" else output) / "README.md"
    console.print(f"{form} -> {output}; {page} says how to use it")
    return 0


class ExportedGraph:
    """The graph that is written, and what it takes and gives.

    Attributes:
        model: what is exported.
        module: on the CPU in plain memory format.
        settings: of settings.json, without the name of the model file.
    """

    def __init__(self, model: LoadedModel, own_profile: Tensor | None) -> None:
        """Copy the model, with the profile of a hospital in it where one is given."""
        self.model = model
        of_hospital = own_profile is not None
        if own_profile is None and model.takes_profile and not image_use(model.experiment.task).shows_scanner:
            own_profile = model.normalization.target
        self.module = copy.deepcopy(model.deployed(own_profile)).cpu().to(memory_format=torch.contiguous_format).eval()
        experiment = model.experiment
        self._own = own_profile
        by_case = model.takes_profile and own_profile is None
        self.settings: dict[str, Any] = {
            "task": experiment.task,
            "inputs": ["images", "case"] if by_case else ["images"],
            "own_profile": of_hospital,
            "classes": list(class_names(experiment)),
            "height": experiment.data.height,
            "width": experiment.data.width,
            "batch": experiment.training.batch_size,
            "upper_percentile": volume_settings(experiment).upper_percentile if experiment.task == "prostate" else None,
        }

    def example(self, batch: int, case: int) -> tuple[Tensor, ...]:
        """Inputs of the first images of a case, in the range of the reader.

        Those of the graph are never one tensor twice, nor of one length: an exporter would take them for the same. Of
        a case that goes beyond the batch one image shows nothing at all and the next one nothing in one channel; not
        of the batch itself, since norm layers make the rounding errors of an empty image large.
        """
        shape = (case, self.model.task.in_channels, self.settings["height"], self.settings["width"])
        rough = torch.rand(shape, generator=torch.Generator().manual_seed(case))
        smooth = nn.functional.avg_pool2d(rough, 9, stride=1, padding=4, count_include_pad=False)
        images = (smooth - smooth.amin()) / (smooth.amax() - smooth.amin())
        if case > batch + 1:
            images[batch], images[batch + 1, 0] = 0.0, 0.4
        return (images[:batch].clone(), images)[: len(self.settings["inputs"])]

    def difference(self, run: Callable[..., Tensor]) -> float:
        """Largest difference of a probability between `run` and this program, over batches of some cases."""
        worst = 0.0
        for batch, case in ((1, 1), (2, 4), (5, 5)):
            inputs = self.example(batch, case)
            own = self._own if len(inputs) == 1 else self.model.profile([inputs[1]])
            with torch.no_grad():  # at once, not in batches as a predictor: `batch_stats` looks at the whole batch
                expected = self.model.deployed(own)(inputs[0].to(self.model.device)).cpu().softmax(1)
            found = run(*inputs).softmax(1)
            if found.shape != expected.shape or not bool(found.isfinite().all()):
                return math.inf
            worst = max(worst, float((expected - found).abs().max()))
        return worst


def _write(graph: ExportedGraph, form: str, folder: Path) -> float:
    """Write everything into a new folder; returns the largest difference of a probability."""
    parts = folder / "models" if form == "monai-bundle" else folder
    parts.mkdir(parents=True)
    settings = {**graph.settings, "model": FILES[form]}
    (parts / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write = _write_onnx if form == "onnx" else _write_torchscript
    write(graph, parts / FILES[form])
    exported = apply_exported.Exported(parts)
    difference = graph.difference(lambda *inputs: torch.from_numpy(exported.run(*(part.numpy() for part in inputs))))
    if form == "monai-bundle":
        write_bundle(graph.model, settings, graph.module, folder)
    else:
        write_code(settings["task"], folder)
        (folder / "README.md").write_text(readme(graph.model, settings, form), encoding="utf-8")
    return difference


def _write_torchscript(graph: ExportedGraph, path: Path) -> None:
    with warnings.catch_warnings(), torch.no_grad():
        # MONAI's U-Net compares sizes in Python, which a trace fixes at those of training: the ones that it is for
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(graph.module, graph.example(2, 3), check_trace=False)
        torch.jit.save(traced, str(path))


def _write_onnx(graph: ExportedGraph, path: Path) -> None:
    _need_onnx()
    batch, case = (torch.export.Dim(name, min=1, max=LARGEST_BATCH) for name in ("batch", "case"))
    inputs = graph.settings["inputs"]
    with _torchvision_unmissed(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph.module,
            graph.example(2, 3),
            dynamo=True,
            input_names=inputs,
            output_names=["logits"],
            dynamic_shapes=tuple({0: size} for size in (batch, case)[: len(inputs)]),
            verbose=False,
        )
    assert program is not None, "the exporter of torch.export returns a program"
    program.save(str(path))


@contextmanager
def _torchvision_unmissed() -> Iterator[None]:
    """Drop the exporter's lines about operators of torchvision, which no network here has; all others are shown."""
    logger = logging.getLogger(OPERATORS)

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _need_onnx() -> None:
    missing = []
    for name in ONNX_NEEDS:
        try:
            version(name)
        except ModuleNotFoundError:
            missing.append(name)
    if missing:
        raise JobError(f"--format onnx: {', '.join(missing)} is not installed; pip install {' '.join(ONNX_NEEDS)}")
