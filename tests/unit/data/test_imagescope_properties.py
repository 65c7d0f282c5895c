"""What holds for the pixels of any outline."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harmofl.data.imagescope import NUCLEUS, Region, draw_regions


def star(radii: np.ndarray, center: tuple[float, float]) -> np.ndarray:
    """An outline around a center; corners on a grid of 1/8 pixel, which whole shifts move without rounding."""
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    points = np.stack([center[0] + radii * np.cos(angles), center[1] + radii * np.sin(angles)], axis=1)
    return np.round(points * 8) / 8


stars = st.builds(
    star,
    arrays(np.float64, st.integers(3, 12), elements=st.floats(2, 14)),
    st.tuples(st.floats(15, 20), st.floats(15, 20)),
)
shifts = st.integers(-40, 40)


def filled(points: np.ndarray, shape: tuple[int, int] = (48, 48)) -> np.ndarray:
    return draw_regions([Region(0, NUCLEUS, points, False)], shape, (NUCLEUS,), "a.xml").target


@settings(deadline=None, max_examples=40)
@given(stars, shifts, shifts)
def test_moving_an_outline_moves_its_pixels(points: np.ndarray, right: int, down: int) -> None:
    large = filled(points + 48, (144, 144))  # with room on all sides
    moved = filled(points + [right, down])
    np.testing.assert_array_equal(moved, large[48 - down : 96 - down, 48 - right : 96 - right])


@settings(deadline=None, max_examples=40)
@given(stars, st.integers(0, 11), st.booleans(), st.data())
def test_where_an_outline_starts_and_which_way_it_runs_does_not_count(
    points: np.ndarray, start: int, backward: bool, data: st.DataObject
) -> None:
    rolled = np.roll(points, start, axis=0)
    rolled = rolled[::-1] if backward else rolled
    repeated = np.repeat(rolled, data.draw(st.integers(1, 3)), axis=0)
    closed = np.concatenate([repeated, repeated[:1]])
    np.testing.assert_array_equal(filled(closed), filled(points))


@settings(deadline=None, max_examples=40)
@given(stars, stars)
def test_a_hole_takes_its_own_pixels_and_no_others(points: np.ndarray, hole: np.ndarray) -> None:
    regions = [Region(0, NUCLEUS, hole, True), Region(0, NUCLEUS, points, False)]
    drawn = draw_regions(regions, (48, 48), (NUCLEUS,), "a.xml").target
    np.testing.assert_array_equal(drawn > 0, (filled(points) > 0) & (filled(hole) == 0))


@settings(deadline=None, max_examples=40)
@given(stars)
def test_pixels_are_those_whose_center_lies_inside(points: np.ndarray) -> None:
    """Oracle: the winding angle of the outline as seen from each pixel center, away from its edges."""
    rows, columns = np.mgrid[:48, :48] + 0.5
    seen = np.arctan2(points[:, 1] - rows[..., None], points[:, 0] - columns[..., None])
    turns = (np.diff(seen, append=seen[..., :1], axis=-1) + np.pi) % (2 * np.pi) - np.pi
    winding = np.rint(turns.sum(axis=-1) / (2 * np.pi)).astype(int) % 2
    along = np.roll(points, -1, axis=0) - points
    apart = np.stack([columns[..., None] - points[:, 0], rows[..., None] - points[:, 1]], axis=-1)
    length = np.maximum((along**2).sum(axis=1), 1e-12)
    nearest = np.clip((apart * along).sum(axis=-1) / length, 0, 1)[..., None] * along
    distance = np.sqrt(((apart - nearest) ** 2).sum(axis=-1)).min(axis=-1)
    clear = distance > 1e-3  # the drawing's offset from half a pixel is smaller
    np.testing.assert_array_equal(filled(points)[clear], winding[clear])
