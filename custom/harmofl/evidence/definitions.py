"""What the scores on a page mean, in words for whoever does not compute them."""

_DEFINITIONS = {
    "dice": "overlap of the predicted and the reference outline: twice their shared area (of a volume: all slices "
    "together) over the sum of both. 1 is identical, 0 nothing in common",
    "published_dice": "what the released HarmoFL code computes: the mean of the Dice of background and of foreground, "
    "over slices that hold foreground, without the outermost ones. It is higher than the Dice above and only for "
    "comparison with published numbers",
    "accuracy": "share of images whose class is called right, all images of a site together",
    "accuracy_by_slide": "accuracy within each slide, then the mean over slides",
    "auroc": "area under the ROC curve: the chance that an image with the finding scores higher than one without. "
    "0.5 is guessing, 1 a perfect order",
    "sensitivity": "share of the images with the finding that are called so",
    "specificity": "share of the images without the finding that are called so",
}
_OF_A_CLASS = "dice_"


def definition(score: str) -> str:
    """One sentence about a score; a task of a user's own defines its scores itself."""
    if score in _DEFINITIONS:
        return _DEFINITIONS[score]
    if score.startswith(_OF_A_CLASS):
        return f"Dice of the class {score.removeprefix(_OF_A_CLASS).replace('_', ' ')} alone"
    return "defined by the task"
