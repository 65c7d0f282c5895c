import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from harmofl.data.volumes import Volume
from harmofl.data.windows import SliceWindows, background_where_blank, volume_windows


def volume(name: str, depth: int, labeled: list[int], dtype: type = np.float16) -> Volume:
    """Slice s of the image holds s everywhere, so that a window shows which slices it took."""
    image = np.arange(depth, dtype=dtype)[:, None, None].repeat(4, axis=1).repeat(6, axis=2)
    mask = np.zeros((depth, 4, 6), np.uint8)
    mask[labeled, 1, 2] = 1
    return Volume(name, image, mask, (3.0, 0.5, 0.5), ())


def channels(windows: SliceWindows) -> list[list[float]]:
    return [windows[item][0][:, 0, 0].tolist() for item in range(len(windows))]


def test_windows_overlap_and_borders_repeat() -> None:
    windows = SliceWindows([volume("a", 4, [])], "all")
    assert channels(windows) == [[0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 3]]
    image, mask = windows[0]
    assert (image.shape, image.dtype) == ((3, 4, 6), torch.float32)
    assert (mask.shape, mask.dtype) == ((4, 6), torch.int64)


def test_two_neighbors_on_each_side() -> None:
    assert channels(SliceWindows([volume("a", 3, [])], "all", neighbors=2))[0] == [0, 0, 0, 1, 2]
    assert volume_windows(volume("a", 3, []), neighbors=2).shape == (3, 5, 4, 6)


@pytest.mark.parametrize(
    ("slices", "keys"),
    [
        ("all", [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 1)]),
        ("foreground", [("a", 0), ("a", 2), ("a", 3), ("b", 0)]),
        ("published", [("a", 2)]),
    ],
)
def test_choice_of_slices(slices, keys) -> None:
    windows = SliceWindows([volume("a", 4, [0, 2, 3]), volume("b", 2, [0])], slices)
    assert windows.keys == keys
    assert len(windows) == len(keys)
    assert windows.without_window == (("b",) if slices == "published" else ())


def test_mask_belongs_to_the_middle_slice() -> None:
    windows = SliceWindows([volume("a", 5, [1, 3])], "foreground")
    for item in range(len(windows)):
        image, mask = windows[item]
        assert image[1, 0, 0] == windows.keys[item][1]
        assert mask.sum() == 1
        assert mask[1, 2] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_slice_that_shows_nothing_holds_nothing(dtype: type) -> None:
    image = np.random.default_rng(0).random((4, 20, 24)).astype(dtype)
    image[1], image[3] = 0.0, 0.3
    labels = torch.ones(4, 40, 30, dtype=torch.uint8)  # on another grid
    assert background_where_blank(labels, image).flatten(1).sum(1).tolist() == [1200, 0, 1200, 0]


@pytest.mark.parametrize(("depth", "expected"), [(1, [[0, 0, 0]]), (2, [[0, 0, 1], [0, 1, 1]])])
def test_b5_thin_volumes(depth: int, expected: list[list[float]]) -> None:
    thin = volume("thin", depth, list(range(depth)))
    assert channels(SliceWindows([thin], "foreground")) == expected
    assert SliceWindows([thin], "published").without_window == ("thin",)


def test_only_restricts_to_a_slice_split() -> None:
    windows = SliceWindows([volume("a", 5, [1, 2, 3]), volume("b", 5, [2])], "published", only={("a", 3), ("b", 2)})
    assert windows.keys == [("a", 3), ("b", 2)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_all_windows_of_a_volume_equal_the_single_ones(dtype: type) -> None:
    whole = volume("a", 7, [2], dtype)
    windows = SliceWindows([whole], "all")
    batch = volume_windows(whole)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch, torch.stack([windows[item][0] for item in range(7)]), rtol=0, atol=0)


def test_items_are_copies_and_batch() -> None:
    whole = volume("a", 4, [1, 2])
    windows = SliceWindows([whole], "foreground")
    windows[0][0].fill_(-1)
    windows[0][1].fill_(-1)
    assert whole.image.min() == 0
    assert whole.mask.max() == 1
    images, masks = next(iter(DataLoader(windows, batch_size=2)))
    assert images.shape == (2, 3, 4, 6)
    assert masks.shape == (2, 4, 6)
