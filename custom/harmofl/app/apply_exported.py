"""Apply an exported HarmoFL model to images: python apply.py IMAGE... -o DIR.

`harmofl export` puts this file beside the model, and with it the folder harmofl_data: the files of the package that
read and check an image. Nothing else of the package is needed, but numpy, torch or onnxruntime as the model is
TorchScript or ONNX, nibabel for volumes, pillow for pictures, monai for tissue. settings.json describes the model.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Arrays = np.ndarray
Run = Callable[..., Arrays]


class Exported:
    """A model file and what it takes.

    Attributes:
        settings: of settings.json.
        run: logits (B, K, ...) of the arrays that `settings["inputs"]` names, float32.
    """

    def __init__(self, folder: Path) -> None:
        """Load settings.json and the model beside it."""
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
        model = folder / self.settings["model"]
        self.run = _onnx(model, self.settings["inputs"]) if model.suffix == ".onnx" else _torchscript(model)

    def logits(self, inputs: Arrays) -> Arrays:
        """Logits of all inputs (N, C, H, W) of one case, in batches as training predicts them."""
        size = self.settings["batch"]
        more = (inputs,) if "case" in self.settings["inputs"] else ()
        parts = [self.run(inputs[start : start + size], *more) for start in range(0, len(inputs), size)]
        return finite(np.concatenate(parts))


def finite(logits: Arrays) -> Arrays:
    """Logits (B, K, ...) as they are.

    Raises:
        FloatingPointError: one of them is not finite, so that no class follows from them.
    """
    if not np.isfinite(logits).all():
        raise FloatingPointError("the model's output is not finite; export the model of another round")
    return logits


def _torchscript(path: Path) -> Run:
    import torch

    model = torch.jit.load(str(path), map_location="cpu").eval()

    def run(*inputs: Arrays) -> Arrays:
        with torch.no_grad():
            return model(*(torch.from_numpy(np.ascontiguousarray(part)) for part in inputs)).numpy()

    return run


def _onnx(path: Path, names: Sequence[str]) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: Arrays) -> Arrays:
        return session.run(None, dict(zip(names, inputs, strict=True)))[0]

    return run


def apply_all(exported: Exported, images: Iterable[Path], output: Path) -> int:
    """Predict every image and tell of each in one line; masks go into the folder `output`.

    Returns:
        how many images could not be used.
    """
    predict = {"prostate": _apply_volume, "nuclei": _apply_tissue, "camelyon17": _apply_patch}
    failed = 0
    for source in images:
        try:
            told = predict[exported.settings["task"]](exported, source, output)
        except _reading("findings").CaseError as error:
            told, failed = [str(error)], failed + 1
        except FloatingPointError as error:
            told, failed = [f"error: {source.name}: {error}"], failed + 1
        sys.stdout.write("".join(f"{line}\n" for line in told))
    return failed


def _reading(name: str) -> Any:
    """A file of harmofl_data: what comes to the network is read by the code that read the images of training."""
    package = f"{__package__}." if __package__ else ""  # `scripts` of a bundle; a script finds what lies beside it
    return import_module(f"{package}harmofl_data.{name}")


def _apply_volume(exported: Exported, source: Path, output: Path) -> list[str]:
    scan = _reading("pairs").read_image(source)
    voxels = _reading("voxels")
    named = _reading("layout").IMAGE_NAME.fullmatch(source.name)
    target = _free(output / f"{named['stem'] if named else source.stem}_segmentation.nii.gz", source)
    inputs = windows(scan.data, exported.settings)
    upper = exported.settings["upper_percentile"]
    sparse = [] if upper is None else voxels.sparse_findings(scan.data, upper, source.name)
    findings = [*scan.findings, *sparse, *voxels.contrast_findings(inputs[:, 1], source.name)]
    labels = resized(softmax(exported.logits(inputs)), *scan.data.shape[1:]).argmax(1).astype(np.uint8)
    labels[list(voxels.blank_slices(inputs[:, 1]))] = 0  # a slice that shows nothing holds nothing
    _reading("nifti_masks").write_labels(labels, source, target)
    milliliters = float(np.count_nonzero(labels) * scan.grid.voxel_ml)
    count = _reading("findings").count_text(int(np.count_nonzero(labels)), "voxel")
    told = f"{source.name}: {count}, {milliliters:.1f} mL -> {target}"
    return [*map(str, findings), told]


def windows(slices: Arrays, settings: dict[str, Any]) -> Arrays:
    """Network inputs (S, 3, H, W) of a volume (S, rows, columns) in left-posterior-superior order."""
    slices = slices.astype(np.float32)
    if settings["upper_percentile"] is not None:
        low, high = slices.min(), np.percentile(slices, settings["upper_percentile"])
        high = slices.max() if high <= low else high
        slices = np.clip((slices - low) / (high - low), 0, 1).astype(np.float32)
    slices = resized(slices, settings["height"], settings["width"])
    if settings["upper_percentile"] is not None:
        slices = slices.astype(np.float16).astype(np.float32)  # training keeps windowed volumes in half precision
    depth = len(slices)
    return np.stack([slices[np.clip(np.arange(at - 1, at + 2), 0, depth - 1)] for at in range(depth)])


def _apply_tissue(exported: Exported, source: Path, output: Path) -> list[str]:
    import torch
    from monai.inferers import sliding_window_inference
    from PIL import Image

    picture, findings = _reading("rasters").read_rgb(source, source.name)
    target = _free(output / f"{source.stem}_mask.png", source)
    size, (rows, columns) = exported.settings["height"], picture.shape[:2]
    picture = np.pad(picture, ((0, max(size - rows, 0)), (0, max(size - columns, 0)), (0, 0)), mode="reflect")

    def logits(tiles: Any) -> Any:
        return torch.from_numpy(finite(exported.run(tiles.numpy())))

    whole = torch.from_numpy(picture.transpose(2, 0, 1).astype(np.float32) / 255)[None]
    found: Any = sliding_window_inference(whole, (size, size), 4, logits, overlap=0.25, mode="gaussian")
    labels = found[0, :, :rows, :columns].argmax(0).numpy().astype(np.uint8)
    Image.fromarray(labels * np.uint8(255 if found.shape[1] == 2 else 1)).save(target)
    return [*map(str, findings), f"{source.name}: {100 * np.mean(labels > 0):.1f} % of the pixels -> {target}"]


def _apply_patch(exported: Exported, source: Path, output: Path) -> list[str]:
    picture, findings = _reading("rasters").read_rgb(source, source.name)
    wanted = (exported.settings["height"], exported.settings["width"])
    if picture.shape[:2] != wanted:
        sizes = " instead of ".join(f"{width} x {height}" for height, width in (picture.shape[:2], wanted))
        fix = "cut patches of the size and magnification of training"
        message = f"the patch has {sizes} pixels (width x height)"
        raise _reading("findings").refusal("patch_size", source.name, message, fix)
    shares = softmax(exported.logits(picture.transpose(2, 0, 1)[None].astype(np.float32) / 255))[0]
    named = zip(exported.settings["classes"], shares, strict=True)
    return [*map(str, findings), f"{source.name}: {', '.join(f'{name} {share:.6f}' for name, share in named)}"]


def _free(target: Path, source: Path) -> Path:
    """The file for a mask, which may be where a mask drawn by hand lies."""
    if target.exists() or target.is_symlink():
        message = f"{target} exists already"
        raise _reading("findings").refusal("exists", source.name, message, "name another folder with -o")
    return target


def resized(planes: Arrays, rows: int, columns: int) -> Arrays:
    """Linear interpolation of the last two axes; pixels are areas, so that both grids cover the same field."""
    for axis, size in ((-2, rows), (-1, columns)):
        length = planes.shape[axis]
        place = np.clip((np.arange(size) + 0.5) * (length / size) - 0.5, 0, length - 1)
        lower = np.floor(place).astype(int)
        share = (place - lower).astype(np.float32).reshape((-1, 1) if axis == -2 else (-1,))
        upper = np.minimum(lower + 1, length - 1)
        planes = np.take(planes, lower, axis) * (1 - share) + np.take(planes, upper, axis) * share
    return planes


def softmax(logits: Arrays) -> Arrays:
    """Probabilities of the classes, the second axis."""
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def _run_from_the_command_line() -> int:
    parser = argparse.ArgumentParser(
        description="Apply an exported HarmoFL model to images. Exit code 0, 1 where an image could not be used."
    )
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE")
    parser.add_argument("-o", "--output", type=Path, default=Path("predictions"), metavar="DIR")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    return int(apply_all(Exported(Path(__file__).resolve().parent), options.images, options.output) > 0)


if __name__ == "__main__":
    sys.exit(_run_from_the_command_line())
