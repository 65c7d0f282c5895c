"""The page that goes with an exported model."""

from typing import Any

from harmofl.app.export_folder import READING
from harmofl.app.model_file import LoadedModel

INPUTS = {
    "prostate": "All slices of one volume in left-posterior-superior order by the file's affine (the sform, else the "
    "qform, as nibabel takes it), each with its neighbors as channels (the border slice stands in for one that is "
    "missing), resized to the size below. Voxels that are no numbers, and padding far outside the image's own range, "
    f"are replaced first (`{READING}/voxels.py`).{{window}}",
    "nuclei": "Square tiles of an RGB picture in 0..1.",
    "camelyon17": "RGB patches in 0..1, of the magnification of training.",
}
NEEDS = {
    "prostate": "nibabel",
    "nuclei": "pillow tifffile imagecodecs torch monai",
    "camelyon17": "pillow tifffile imagecodecs",
}
ENDINGS = {"prostate": ".nii.gz", "nuclei": ".tif", "camelyon17": ".png"}
RUNTIME = {"torchscript": "torch", "monai-bundle": "torch monai fire", "onnx": "onnxruntime"}


def readme(model: LoadedModel, settings: dict[str, Any], form: str) -> str:
    """Markdown: what the model is, what it takes and gives, and how to run it."""
    experiment, checkpoint = model.experiment, model.checkpoint
    task, height, width = experiment.task, settings["height"], settings["width"]
    code = "`scripts` is" if form == "monai-bundle" else f"`apply.py` with `{READING}` beside it is"
    return f"""# {experiment.name}

Task {task}, network {experiment.network.name}, method {experiment.method}, {counted(checkpoint.next_round, "round")};
run {checkpoint.run_id}, experiment {checkpoint.experiment_hash}. For research; not a medical device.

## Run it

```bash
{_commands(task, form)}
```

{code} all the code that is needed: it reads and checks an image, prepares it as training did, runs
`{settings["model"]}` and writes the answer. An image that training would refuse is refused by one line.

## What the graph takes and gives

{_inputs(settings, task)}

Output `logits` (B, {len(settings["classes"])}{", H, W" if task != "camelyon17" else ""}): softmax over axis 1 gives the
probabilities of {", ".join(settings["classes"])}. H, W = {height}, {width}.

## The amplitude step

{_amplitude(model, settings)}
"""


def counted(number: int, what: str) -> str:
    """A number with its noun: 1 round, 2 rounds."""
    return f"{number} {what}{'s' * (number != 1)}"


def _commands(task: str, form: str) -> str:
    packages = " ".join(dict.fromkeys(["numpy", *RUNTIME[form].split(), *NEEDS[task].split()]))
    if form == "monai-bundle":
        run = (
            "python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json "
            "--dataset_dir IMAGES --output_dir PREDICTIONS"
        )
    else:
        run = f"python apply.py image{ENDINGS[task]} -o predictions"
    return f"pip install {packages}\n{run}"


def _amplitude(model: LoadedModel, settings: dict[str, Any]) -> str:
    amplitude, checkpoint = model.experiment.amplitude, model.checkpoint
    inside = f"Inside the graph: intensity `{amplitude.intensity}`, region `{amplitude.region}`"
    if amplitude.region == "off":
        return f"{inside}: the amplitude of an image stays as it is."
    images, sites = counted(checkpoint.amplitude_images, "image"), checkpoint.amplitude_sites
    origin = f" of {counted(len(sites), 'site')} ({', '.join(sites)})" if sites else ""
    return f"{inside}, global amplitude of {images}{origin}.\n{_profile(model, settings)}".rstrip()


def _inputs(settings: dict[str, Any], task: str) -> str:
    percentile = settings["upper_percentile"]
    window = (
        f" Intensities run from the volume's minimum (0) to its {percentile:g}th percentile (1), clipped, rounded to "
        "half precision."
        if percentile is not None
        else " Intensities are those of the file."
    )
    text = f"Input `images` (B, 3, H, W) float32, any B. {INPUTS[task].format(window=window)}"
    if "case" in settings["inputs"]:
        text += (
            "\n\nInput `case` (N, 3, H, W) float32: all inputs of the same image, from which its profile is measured; "
            "the same array as `images` where one batch holds them all."
        )
    return text


def _profile(model: LoadedModel, settings: dict[str, Any]) -> str:
    if not model.takes_profile:
        return ""
    if "case" in settings["inputs"]:
        return "The own profile is measured from `case`."
    if settings["own_profile"]:
        return "The own profile of one hospital is in the graph: use it on images of that hospital."
    return (
        "No own profile is in the graph: the gain is 1, as for a hospital whose profile is that of all sites together."
    )
