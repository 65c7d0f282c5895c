"""A MONAI bundle: metadata, inference configuration, weights, graph and the code to apply it."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harmofl.app.export_folder import write_code
from harmofl.app.export_readme import counted, readme
from harmofl.app.model_file import LoadedModel

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
PICTURES = ("pillow", "tifffile", "imagecodecs")
REQUIRED = {"prostate": ("nibabel",), "nuclei": PICTURES, "camelyon17": PICTURES}
PAPER = (
    "Jiang M., Wang Z., Dou Q.: HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous "
    "Medical Images. AAAI 2022. https://arxiv.org/abs/2112.10775"
)
TEXTS = {
    "prostate": ("Prostate segmentation on T2-weighted MRI", "MR", "*.nii*"),
    "nuclei": ("Segmentation of nuclei in H&E images", "H&E", "*.[pt][ni][gf]*"),
    "camelyon17": ("Detection of tumor in patches of lymph nodes", "H&E", "*.png"),
}
LICENSE = "Weights: as agreed by the sites that trained them. scripts: Apache-2.0.\n"


def write_bundle(model: LoadedModel, settings: dict[str, Any], module: nn.Module, folder: Path) -> None:
    """Write all of a bundle but models/model.ts and models/settings.json, which are there."""
    for name in ("configs", "docs", "scripts"):
        (folder / name).mkdir()
    torch.save(module.state_dict(), folder / "models" / "model.pt")
    for name, content in (("metadata", metadata(model, settings)), ("inference", inference(model))):
        (folder / "configs" / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "scripts" / "__init__.py").write_text("from . import apply as apply\n", encoding="utf-8")
    write_code(settings["task"], folder / "scripts")
    (folder / "docs" / "README.md").write_text(readme(model, settings, "monai-bundle"), encoding="utf-8")
    (folder / "docs" / "license.txt").write_text(LICENSE, encoding="utf-8")


def metadata(model: LoadedModel, settings: dict[str, Any]) -> dict[str, Any]:
    """metadata.json by MONAI's specification of bundles."""
    experiment, checkpoint = model.experiment, model.checkpoint
    what, modality, _ = TEXTS[experiment.task]
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported from run {checkpoint.run_id}, round {checkpoint.next_round - 1}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").split("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {name: version(name) for name in REQUIRED[experiment.task]},
        "optional_packages_version": {},
        "name": experiment.name,
        "task": what,
        "description": f"{experiment.network.name} trained by method {experiment.method}, "
        f"{counted(checkpoint.next_round, 'federated round')}, with its amplitude step "
        f"(intensity {experiment.amplitude.intensity}, region {experiment.amplitude.region})",
        "authors": "the sites of the federation",
        "copyright": "the sites of the federation",
        "intended_use": "research; not a medical device",
        "references": [PAPER],
        "network_data_format": {
            "inputs": {name: _tensor(settings, modality) for name in settings["inputs"]},
            "outputs": {"logits": _output(settings, modality)},
        },
    }


def _tensor(settings: dict[str, Any], modality: str) -> dict[str, Any]:
    volume = settings["task"] == "prostate"
    channels = ("slice below", "slice", "slice above") if volume else ("red", "green", "blue")
    windowed = settings["upper_percentile"] is not None or not volume
    return {
        "type": "image",
        "format": "magnitude" if volume else "RGB",
        "modality": modality,
        "num_channels": len(channels),
        "spatial_shape": [settings["height"], settings["width"]],
        "dtype": "float32",
        "value_range": [0, 1] if windowed else [],
        "is_patch_data": settings["task"] != "prostate",
        "channel_def": {str(number): name for number, name in enumerate(channels)},
    }


def _output(settings: dict[str, Any], modality: str) -> dict[str, Any]:
    whole = settings["task"] == "camelyon17"
    return {
        "type": "probabilities" if whole else "image",
        "format": "labels",
        "modality": modality,
        "num_channels": len(settings["classes"]),
        "spatial_shape": [] if whole else [settings["height"], settings["width"]],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": settings["task"] == "nuclei",
        "channel_def": {str(number): name for number, name in enumerate(settings["classes"])},
    }


def inference(model: LoadedModel) -> dict[str, Any]:
    """inference.json: `python -m monai.bundle run --config_file configs/inference.json` in the bundle's folder."""
    pattern = TEXTS[model.experiment.task][2]
    return {
        "imports": ["$from pathlib import Path", "$from scripts import apply"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/output'",
        "images": f"$sorted(Path(@dataset_dir).glob('{pattern}'))",
        "exported": "$apply.Exported(Path(@bundle_root) / 'models')",
        "initialize": ["$Path(@output_dir).mkdir(parents=True, exist_ok=True)"],
        "run": ["$apply.apply_all(@exported, @images, Path(@output_dir))"],
    }
