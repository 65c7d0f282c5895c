"""What a model file must hold to predict, and what is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harmofl.app.cli import main
from harmofl.app.model_file import ModelFileError, _device, load_model
from harmofl.core.training import predict
from harmofl.flare.local_amplitude import build_normalization
from tests.unit.app.model_files import JOBS, ModelOfTask, altered, small_experiment, write_model


def test_a_model_is_what_training_left(prostate_model: ModelOfTask) -> None:
    model = load_model(prostate_model.path, device="cpu")
    held = torch.load(prostate_model.path, weights_only=True)
    assert all(torch.equal(value, held["model"][name]) for name, value in model.network.state_dict().items())
    assert torch.equal(model.normalization.target, held["harmofl"]["amplitude"])
    assert model.experiment == prostate_model.experiment
    assert not model.network.training and not any(entry.requires_grad for entry in model.network.parameters())


def test_a_profile_is_the_mean_over_all_inputs(prostate_model: ModelOfTask) -> None:
    model = load_model(prostate_model.path, device="cpu")
    windows = torch.stack([prostate_model.data.training[item][0] for item in range(7)])
    expected = build_normalization(model.experiment, 3).statistics(windows).double().mean(0)
    assert torch.allclose(model.profile(windows.split(3)), expected.float(), atol=1e-6)


def test_a_profile_leaves_out_what_has_no_contrast(prostate_model: ModelOfTask) -> None:
    model = load_model(prostate_model.path, device="cpu")
    windows = torch.stack([prostate_model.data.training[item][0] for item in range(7)])
    each = build_normalization(model.experiment, 3).statistics(windows).double()
    windows[0], windows[5, 2] = 0.0, 0.5
    # channel 2 keeps windows 1 to 4 and 6, the others 1 to 6
    kept = [each[1:, 0].mean(0), each[1:, 1].mean(0), each[[1, 2, 3, 4, 6], 2].mean(0)]
    assert torch.allclose(model.profile(windows.split(3)), torch.stack(kept).float(), atol=1e-6)


def test_predictions_are_those_of_the_training_loop(prostate_model: ModelOfTask) -> None:
    """With a hospital's own profile, as a site of the federation scores the model in every round."""
    model = load_model(prostate_model.path, device="cpu")
    windows = torch.stack([prostate_model.data.training[item][0] for item in range(7)])
    own = model.profile([windows.square()])
    assert own is not None
    trained = copy.deepcopy(model.normalization)
    trained.set_own(own)
    expected = predict(model.network, trained, windows, batch_size=4)
    assert torch.allclose(model.predictor(own)(windows), expected, atol=1e-3)


@pytest.mark.parametrize("region", ["off", "dc", "full"])
def test_other_regions_need_no_profile(tmp_path: Path, prostate_model: ModelOfTask, region: str) -> None:
    changes = {"amplitude.region": region, "amplitude.intensity": "window"}
    path = write_model(tmp_path / "model.pt", small_experiment("prostate", changes), prostate_model.data)
    model = load_model(path, device="cpu")
    windows = torch.stack([prostate_model.data.training[item][0] for item in range(3)])
    assert model.profile([windows]) is None
    expected = model.network(model.normalization(windows))
    assert torch.allclose(model.predictor()(windows), expected, atol=1e-3)


def change_experiment(key: str, value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        experiment = json.loads(content["harmofl"]["experiment"])
        section, _, last = key.rpartition(".")
        (experiment[section] if section else experiment)[last] = value
        content["harmofl"]["experiment"] = json.dumps(experiment)

    return change


def remove(name: str) -> Any:
    return lambda content: content["harmofl"].pop(name)


def set_amplitude(value: Any) -> Any:
    return lambda content: content["harmofl"].update(amplitude=value)


def spoil_weights(content: dict[str, Any]) -> None:
    next(iter(content["model"].values())).fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_experiment("network.width", 8), "its weights are not those of the unet of width 8 with instance norm"),
        (change_experiment("network.name", "densenet121"), "task prostate needs unet, not 'densenet121'"),
        (change_experiment("task", "disks.DiskTask"), "its task disks.DiskTask comes from outside the package"),
        (change_experiment("task", "liver"), "'liver' is none of prostate, camelyon17, nuclei"),
        (change_experiment("data.height", 10), "its experiment: data.height"),
        (set_amplitude(None), "holds no amplitude, which region site_gain needs"),
        (set_amplitude(torch.zeros(3, 4)), "the global amplitude has shape"),
        (remove("run_id"), "the checkpoint lacks run_id"),
        (remove("format"), "not a HarmoFL checkpoint"),
        (spoil_weights, "weights are not finite"),
    ],
)
def test_what_cannot_predict_is_refused(prostate_model: ModelOfTask, tmp_path: Path, change: Any, message: str) -> None:
    path = altered(prostate_model.path, tmp_path / "changed.pt", change)
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert message in str(caught.value) and "changed.pt" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("method", "layers"), [("fedbn", "norm layers"), ("local_only", "a model of its own")])
def test_a_file_without_the_layers_that_sites_kept_is_refused_by_every_command(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, layers: str
) -> None:
    """The norm layers of such a file have their initial values: its answers would be wrong and look like any."""
    path = write_model(tmp_path / "kept.pt", small_experiment("prostate", {"method": method}), prostate_model.data)
    image, out = str(prostate_model.images[0]), str(tmp_path / "out")
    for command in (
        ["predict", image, "-o", out],
        ["evaluate", str(prostate_model.folder), "-o", out],
        ["export", "--format", "torchscript", "-o", out],
    ):
        assert main([*command, "--model", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"harmofl {command[0]}: kept.pt: method {method} (federation.local_layers")
        assert layers in said and said.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_fedbn_on_a_network_whose_norm_layers_hold_nothing_leaves_a_whole_model(
    prostate_model: ModelOfTask, tmp_path: Path
) -> None:
    experiment = small_experiment("prostate", {"method": "fedbn", "network.norm": "batch_stats"})
    load_model(write_model(tmp_path / "model.pt", experiment, prostate_model.data))


def test_a_missing_and_a_damaged_file_are_refused(prostate_model: ModelOfTask, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.pt: no such checkpoint"):
        load_model(tmp_path / "gone.pt")
    cut = tmp_path / "cut.pt"
    cut.write_bytes(prostate_model.path.read_bytes()[:5000])
    with pytest.raises(ModelFileError, match=r"cut\.pt cannot be read"):
        load_model(cut)


def test_a_file_with_flipped_bytes_does_not_predict(
    prostate_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bytearray(prostate_model.path.read_bytes())
    middle = slice(len(whole) // 2, len(whole) // 2 + 64)
    whole[middle] = bytes(255 - byte for byte in whole[middle])
    (tmp_path / "flipped.pt").write_bytes(whole)
    command = ["predict", "--model", str(tmp_path / "flipped.pt"), str(prostate_model.images[0])]
    assert main([*command, "-o", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("harmofl predict: flipped.pt is damaged (the checksum of ") and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_of_another_task_is_refused_by_name(
    nuclei_model: ModelOfTask, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--model", str(nuclei_model.path), "--job", str(JOBS / "harmofl_prostate")]
    assert main([*command, str(nuclei_model.images[0]), "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "harmofl predict: nuclei.pt: a model of task nuclei, not of prostate\n"


def test_a_model_of_another_network_is_refused_by_name(prostate_model: ModelOfTask) -> None:
    other = small_experiment("prostate", {"network.width": 16})
    with pytest.raises(ModelFileError, match="its network is unet of width 4 .* the job's is unet of width 16"):
        load_model(prostate_model.path, [other])
    load_model(prostate_model.path, [other, prostate_model.experiment])


@pytest.mark.parametrize(
    ("asked", "cards", "chosen"), [("auto", 1, "cuda"), ("cuda", 1, "cuda"), ("cpu", 1, "cpu"), ("auto", 0, "cpu")]
)
def test_a_model_is_used_on_the_gpu_that_is_there(
    monkeypatch: pytest.MonkeyPatch, asked: str, cards: int, chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    assert _device(asked).type == chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused(prostate_model: ModelOfTask) -> None:
    with pytest.raises(ModelFileError, match="no GPU"):
        load_model(prostate_model.path, device="cuda")
