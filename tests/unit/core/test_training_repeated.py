"""Training over epochs and many steps: fresh augmentation each epoch, odd last batches, half precision. C4, C5, C14."""

import pytest
import torch
from toy_segmentation import cross_entropy, dataset, equal, fitted

from harmofl.core.networks import build_network


def seen_by_epoch(seed: int, epochs: int = 3) -> list[torch.Tensor]:
    """The augmented target of every image, by epoch, in the order of training; images of a set have one each."""
    targets: list[torch.Tensor] = []

    def noting(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        targets.append(target.clone())
        return cross_entropy(logits, target)

    fitted(seed=seed, epochs=epochs, alpha=0.0, loss=noting)
    whole = torch.cat(targets)
    return list(whole.split(len(whole) // epochs))


def moves(targets: torch.Tensor) -> list[tuple[int, int]]:
    """For every image of the set, in its order, by which of the 8 symmetries it was moved: (turns, flipped)."""
    found: dict[int, tuple[int, int]] = {}
    originals = dataset().tensors[1]
    for target in targets:
        for number, original in enumerate(originals):
            for flipped in (0, 1):
                for turns in range(4):
                    moved = torch.rot90(original.flip(1) if flipped else original, turns, (0, 1))
                    if torch.equal(moved, target):
                        found[number] = (turns, flipped)
    return [found[number] for number in range(len(originals))]


def test_c14_every_epoch_has_an_augmentation_of_its_own_and_equal_runs_have_equal_ones() -> None:
    first, again, other = seen_by_epoch(1), seen_by_epoch(1), seen_by_epoch(2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    drawn = [moves(epoch) for epoch in first]
    # 10 images with 8 symmetries each: two epochs agree in all by a chance of 1e-9
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert moves(other[0]) != drawn[0]


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_c4_a_last_batch_of_one_image_trains(norm: str) -> None:
    *_, result = fitted(dataset(17), norm=norm, batch_size=16)
    assert (result.steps, result.skipped_steps, result.images) == (2, 0, 17)


def test_c4_a_last_batch_of_one_image_trains_with_the_published_norm_layers() -> None:
    network = build_network("unet", 3, (0.5, 0.5), width=4, norm="batch_stats", seed=0).train()
    logits = network(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    logits.square().mean().backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in network.parameters())


def test_c5_half_precision_learns_as_single_precision_does() -> None:
    """210 perturbed steps under a loss scaler: the losses of the last rounds are within 2 %."""
    last = {}
    for precision in ("float32", "float16"):
        *_, result = fitted(rounds=70, precision=precision)
        assert result.skipped_steps == 0
        last[precision] = result.loss
    *_, start = fitted()
    assert last["float32"] < 0.8 * start.loss, "there was something to learn"
    assert last["float16"] == pytest.approx(last["float32"], rel=0.02)
    assert not equal(fitted(precision="float16")[0], fitted()[0])
