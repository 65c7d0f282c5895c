"""`harmofl export`: every format answers as this program does, and the code beside it runs alone."""

import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harmofl.app.apply_exported import Exported, resized, windows
from harmofl.app.export import OPERATORS, ExportedGraph, _torchvision_unmissed
from harmofl.app.export_readme import readme
from harmofl.app.model_file import load_model
from harmofl.data.nifti import read_scan
from harmofl.data.unlabeled import read_fitted_scan
from harmofl.data.windows import image_windows
from harmofl.tasks.prostate import volume_settings
from tests.unit.app.exported import assert_alike, contents, export, predicted, run_alone
from tests.unit.app.model_files import ModelOfTask, altered, small_experiment, write_model


def test_torchscript_segments_a_volume_as_predict_does(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(prostate_model, "torchscript", tmp_path / "ts") == 0
    assert "largest difference of a probability against this program" in capsys.readouterr().out
    images = prostate_model.images[:2]
    run_alone(tmp_path / "ts", images, tmp_path / "alone")
    assert_alike(contents(tmp_path / "alone"), predicted(prostate_model, images, tmp_path / "predicted"))
    page = (tmp_path / "ts" / "README.md").read_text()
    assert "python apply.py image.nii.gz -o predictions" in page and "Input `case`" in page
    count = len(prostate_model.data.training)
    assert "method harmofl, 1 round;" in page and f"global amplitude of {count} images of 1 site (A)." in page


@pytest.mark.parametrize("region", ["off", "full"])
def test_the_page_says_what_was_done_to_the_amplitude(prostate_model: ModelOfTask, tmp_path: Path, region: str) -> None:
    changes = {"method": "fedavg"} if region == "off" else {"amplitude.region": region, "amplitude.intensity": "window"}
    path = write_model(tmp_path / "model.pt", small_experiment("prostate", changes), prostate_model.data)
    if region == "full":
        altered(path, path, lambda content: content["harmofl"].update(amplitude_images=1, amplitude_sites=["A", "B"]))
    model = load_model(path, device="cpu")
    page = readme(model, ExportedGraph(model, None).settings | {"model": "model.ts"}, "torchscript")
    assert "of 0 images" not in page and "no site" not in page
    said = {
        "off": "region `off`: the amplitude of an image stays as it is.\n",
        "full": "region `full`, global amplitude of 1 image of 2 sites (A, B).\n",
    }
    assert page.endswith(said[region])
    assert f"network unet, method {'fedavg' if region == 'off' else 'harmofl'}, 1 round;" in page


def test_a_hospitals_profile_is_in_the_graph(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    profile = ("--profile-of", str(prostate_model.folder))
    assert export(prostate_model, "torchscript", tmp_path / "ts", *profile) == 0
    settings = json.loads((tmp_path / "ts" / "settings.json").read_text())
    assert settings["inputs"] == ["images"] and settings["own_profile"]
    images = prostate_model.images[:1]
    run_alone(tmp_path / "ts", images, tmp_path / "alone")
    assert_alike(contents(tmp_path / "alone"), predicted(prostate_model, images, tmp_path / "predicted", *profile))


def test_torchscript_segments_tissue_as_predict_does(nuclei_model: ModelOfTask, tmp_path: Path) -> None:
    assert export(nuclei_model, "torchscript", tmp_path / "ts") == 0
    images = nuclei_model.images[:2]
    run_alone(tmp_path / "ts", images, tmp_path / "alone")
    assert_alike(contents(tmp_path / "alone"), predicted(nuclei_model, images, tmp_path / "predicted"))


def test_torchscript_answers_patches_as_predict_does(camelyon17_model: ModelOfTask, tmp_path: Path) -> None:
    assert export(camelyon17_model, "torchscript", tmp_path / "ts") == 0
    images = camelyon17_model.images[:2]
    told = run_alone(tmp_path / "ts", images, tmp_path / "alone").splitlines()
    rows = predicted(camelyon17_model, images, tmp_path / "predicted")["predictions.csv"].splitlines()[1:]
    for line, row in zip(told, rows, strict=True):
        shares = [float(part.split()[-1]) for part in line.split(": ")[1].split(", ")]
        assert shares == pytest.approx([float(share) for share in row.split(",")[1:]], abs=1e-4)


@pytest.mark.parametrize(("intensity", "region"), [("window", "dc"), ("zscore", "low"), ("window", "full")])
def test_every_region_is_in_the_graph(prostate_model: ModelOfTask, tmp_path: Path, intensity: str, region: str) -> None:
    changes = {"amplitude.intensity": intensity, "amplitude.region": region, "network.norm": "batch_stats"}
    model = write_model(tmp_path / "model.pt", small_experiment("prostate", changes), prostate_model.data)
    assert export(model, "torchscript", tmp_path / "ts") == 0
    exported, loaded = Exported(tmp_path / "ts"), load_model(model, device="cpu")
    images = torch.stack([prostate_model.data.training[item][0] for item in range(4)])
    expected = loaded.network(loaded.normalization(images)).softmax(1)  # as training defined it
    found = torch.from_numpy(exported.run(images.numpy())).softmax(1)
    assert torch.allclose(found, expected, atol=1e-4)


def test_onnx_segments_a_volume_as_predict_does(
    prostate_model: ModelOfTask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onnxruntime")
    assert export(prostate_model, "onnx", tmp_path / "onnx") == 0
    assert not [record for record in caplog.records if "torchvision" in record.getMessage()]
    images = prostate_model.images[:2]
    run_alone(tmp_path / "onnx", images, tmp_path / "alone")
    assert_alike(contents(tmp_path / "alone"), predicted(prostate_model, images, tmp_path / "predicted"))


def test_only_lines_about_torchvision_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(OPERATORS)
    with _torchvision_unmissed():
        for name in ("torchvision", "onnxscript"):
            logger.warning("%s is not installed. Skipping %s::nms", name, name)
    logger.warning("torchvision is not installed. Skipping torchvision::nms")
    told = [record.getMessage().split()[0] for record in caplog.records]
    assert told == ["onnxscript", "torchvision"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nuclei", "camelyon17"])
def test_onnx_of_the_other_tasks(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert export(request.getfixturevalue(f"{task}_model"), "onnx", tmp_path / "onnx") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("intensity", "region"), [("window", "dc"), ("zscore", "low"), ("window", "full")])
def test_onnx_of_the_other_regions(prostate_model: ModelOfTask, tmp_path: Path, intensity: str, region: str) -> None:
    pytest.importorskip("onnxruntime")
    changes = {"amplitude.intensity": intensity, "amplitude.region": region}
    model = write_model(tmp_path / "model.pt", small_experiment("prostate", changes), prostate_model.data)
    assert export(model, "onnx", tmp_path / "onnx") == 0


def test_a_graph_that_answers_otherwise_is_not_left(
    prostate_model: ModelOfTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias is moved between the export and the check."""

    def spoiled(self: ExportedGraph, batch: int, case: int) -> tuple[torch.Tensor, ...]:
        inputs = plain(self, batch, case)
        list(self.model.network.parameters())[-1].add_(torch.tensor([0.1, 0.0]))
        return inputs

    plain = ExportedGraph.example
    monkeypatch.setattr(ExportedGraph, "example", spoiled)
    assert export(prostate_model, "torchscript", tmp_path / "out" / "ts") == 1
    assert "not exported: more than 0.0001 apart" in capsys.readouterr().out
    assert list((tmp_path / "out").iterdir()) == []


def test_onnx_without_its_packages_is_refused(
    prostate_model: ModelOfTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("harmofl.app.export.ONNX_NEEDS", ("onnx-of-tomorrow",))
    assert export(prostate_model, "onnx", tmp_path / "onnx") == 2
    assert "onnx-of-tomorrow is not installed; pip install onnx-of-tomorrow" in capsys.readouterr().err


TENSOR = {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range"}
# What the published schema (2024-07-25) of metadata.json asks for.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "schema",
        "version",
        "monai_version",
        "pytorch_version",
        "numpy_version",
        "required_packages_version",
        "task",
        "description",
        "authors",
        "copyright",
        "network_data_format",
    ],
    "properties": {
        **{name: {"type": "string"} for name in ("schema", "version", "monai_version", "pytorch_version")},
        **{name: {"type": "string"} for name in ("numpy_version", "task", "description", "authors", "copyright")},
        **{name: {"type": "object"} for name in ("changelog", "required_packages_version")},
        "references": {"type": "array", "items": {"type": "string"}},
        "network_data_format": {
            "type": "object",
            "required": ["inputs", "outputs"],
            "additionalProperties": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "required": sorted(TENSOR),
                    "properties": {
                        "num_channels": {"type": "integer"},
                        "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
                        "value_range": {"type": "array", "items": {"type": "number"}},
                        "is_patch_data": {"type": "boolean"},
                        "channel_def": {"type": "object"},
                    },
                },
            },
        },
    },
}


@pytest.mark.parametrize("task", ["prostate", "nuclei", "camelyon17"])
def test_a_bundle_is_verified_and_run_by_monai(
    task: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonschema")
    from monai.bundle import ConfigParser, verify_metadata

    model: ModelOfTask = request.getfixturevalue(f"{task}_model")
    bundle = tmp_path / "bundle"
    assert export(model, "monai-bundle", bundle) == 0
    # the schema lies where MONAI would have put the one that it downloads
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    verify_metadata(meta_file=str(bundle / "configs" / "metadata.json"), filepath=str(tmp_path / "schema.json"))
    (tmp_path / "in").mkdir()
    for image in model.images[:2]:
        (tmp_path / "in" / image.name).write_bytes(image.read_bytes())
    monkeypatch.syspath_prepend(bundle)
    for name in [name for name in sys.modules if name.split(".")[0] == "scripts"]:
        monkeypatch.delitem(sys.modules, name)
    parser = ConfigParser()
    parser.read_config(str(bundle / "configs" / "inference.json"))
    parser.update(
        {"bundle_root": str(bundle), "dataset_dir": str(tmp_path / "in"), "output_dir": str(tmp_path / "out")}
    )
    parser.get_parsed_content("initialize")
    assert parser.get_parsed_content("run") == [0], "no image failed"
    if task != "camelyon17":
        assert_alike(contents(tmp_path / "out"), predicted(model, model.images[:2], tmp_path / "predicted"))
    for name in [name for name in sys.modules if name.split(".")[0] == "scripts"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_bundle_holds_the_weights_of_its_graph(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    assert export(prostate_model, "monai-bundle", tmp_path / "bundle") == 0
    weights = torch.load(tmp_path / "bundle" / "models" / "model.pt", weights_only=True)
    graph = torch.jit.load(str(tmp_path / "bundle" / "models" / "model.ts")).state_dict()
    held = {name: value for name, value in graph.items() if name in weights}
    assert held and all(torch.equal(value, weights[name]) for name, value in held.items())
    assert any(name.startswith("network.") for name in held)


@pytest.mark.parametrize("percentile", [99.0, None])
def test_volumes_are_prepared_as_training_prepares_them(prostate_model: ModelOfTask, percentile: float | None) -> None:
    image = prostate_model.images[0]
    settings = volume_settings(prostate_model.experiment)
    settings = type(settings)(80, 72, percentile)
    expected = image_windows(read_fitted_scan(image, settings).image).numpy()
    found = windows(read_scan(image).data, {"height": 80, "width": 72, "upper_percentile": percentile})
    # half precision has steps of 5e-4 below 1, so rounding may fall on the next one
    scale = 1.0 if percentile else float(np.abs(expected).max())
    np.testing.assert_allclose(found / scale, expected / scale, atol=6e-4)
    assert np.mean(found != expected) < 0.05 or percentile is None


@pytest.mark.parametrize("size", [(64, 96), (31, 40), (7, 5)])
def test_resizing_is_that_of_torch(size: tuple[int, int]) -> None:
    planes = np.random.default_rng(0).random((2, 3, 20, 33)).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(planes), size, mode="bilinear", align_corners=False)
    np.testing.assert_allclose(resized(planes, *size), expected.numpy(), atol=1e-5)


def test_the_model_file_is_only_read(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    before = hashlib.sha256(prostate_model.path.read_bytes()).hexdigest()
    assert export(prostate_model, "torchscript", tmp_path / "ts") == 0
    assert hashlib.sha256(prostate_model.path.read_bytes()).hexdigest() == before


def test_the_exported_window_is_that_of_the_model_s_own_job(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    def narrow(content: dict[str, Any]) -> None:
        experiment = json.loads(content["harmofl"]["experiment"])
        assert experiment["reader"]["upper_percentile"] == 99
        experiment["reader"]["upper_percentile"] = 60
        content["harmofl"]["experiment"] = json.dumps(experiment)

    model = load_model(altered(prostate_model.path, tmp_path / "narrow.pt", narrow))
    settings = ExportedGraph(model, None).settings
    assert settings["upper_percentile"] == volume_settings(model.experiment).upper_percentile == 60
    scan = read_fitted_scan(prostate_model.images[0], volume_settings(model.experiment))
    # the volume has the size of training: 40 % of its voxels lie at the end of the window or beyond
    assert np.mean(scan.image == 1) == pytest.approx(0.4, abs=0.01)
    data = read_scan(prostate_model.images[0]).data
    np.testing.assert_allclose(windows(data, settings)[:, 1], scan.image, atol=2.0**-11)
