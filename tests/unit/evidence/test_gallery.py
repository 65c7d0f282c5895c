"""gallery.html: one display window for all sites, outlines where the masks are, nothing loaded from elsewhere."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from harmofl.evidence.gallery import Example, Gallery, SiteExamples, Step, pair_distances, spread, write_gallery

HOSTILE = "<script>alert(1)</script>&\"'"
MASK = np.zeros((6, 8), bool)
MASK[1:3, 2:4] = True
STEPS = (Step("as read", "from the files"), Step("after the amplitude step", "one gain"))


def site(name: str, level: float, profiles: list[list[float]]) -> SiteExamples:
    """One masked example: every channel is constant, its number above `level`; ten times that after the step."""
    image = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None, None] + np.float32(level), (3, 6, 8))
    example = Example((image, 10 * image), mask=MASK)
    return SiteExamples(name, "a scanner", 7, (example,), np.array(profiles))


@pytest.fixture
def gallery() -> Gallery:
    sites = (site("A", 0, [[1, 2], [4, 4]]), site("B", 100, [[3, 6], [4, 4]]))
    return Gallery("job", ("method harmofl",), False, STEPS, sites, np.array([0.25, 0.5]))


def written(gallery: Gallery, folder: Path) -> str:
    write_gallery(gallery, folder / "gallery.html")
    assert [path.name for path in folder.iterdir()] == ["gallery.html"]
    return (folder / "gallery.html").read_text(encoding="utf-8")


def pictures(page: str) -> list[np.ndarray]:
    sources = re.findall(r'<img src="data:image/png;base64,([^"]*)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(source, validate=True)))) for source in sources]


def test_gray_is_the_middle_channel_in_one_window_for_all_sites(gallery: Gallery, tmp_path: Path) -> None:
    page = written(gallery, tmp_path)
    # middle channels are 1 at A and 101 at B: percentiles 1 and 99 over both are the two values themselves
    shown = pictures(page)
    assert [picture.shape for picture in shown] == [(6, 8)] * 4
    assert [np.unique(picture).tolist() for picture in shown] == [[0], [0], [255], [255]]
    assert "1 to 101 as read, 10 to 1.01e+03 after the amplitude step" in " ".join(page.split())


def test_colors_as_read_keep_the_range_of_the_files(gallery: Gallery, tmp_path: Path) -> None:
    image = np.stack([np.full((6, 8), value, np.float32) for value in (0.0, 0.5, 2.0)])
    colored = SiteExamples("A", "a laboratory", 1, (Example((image, image), label="tumor"),), np.zeros((2, 2)))
    page = written(replace(gallery, is_color=True, sites=(colored,)), tmp_path)
    as_read, after = pictures(page)
    assert as_read.shape == (6, 8, 3)
    assert as_read[0, 0].tolist() == [0, 128, 255]  # 0.5 * 255 = 127.5 rounds to even, 2 is cut off
    assert after[0, 0].tolist() == [0, 64, 255]  # the window is 0 to 2: 63.75
    assert "<small>tumor</small>" in page
    assert "border of the mask" not in page and '<svg viewBox="0 0 8 6"' not in page


def test_outlines_run_along_the_masks_pixels(gallery: Gallery, tmp_path: Path) -> None:
    page = written(gallery, tmp_path)
    paths = re.findall(r'<svg viewBox="0 0 8 6"[^>]*><path d="M([^"]*)Z"', page)
    assert len(paths) == 4
    points = np.array(paths[0].replace("L", " ").split(), float).reshape(-1, 2)
    # rows 1 and 2, columns 2 and 3: edges at x 2 and 4, y 1 and 3
    assert points.min(0).tolist() == [2, 1] and points.max(0).tolist() == [4, 3]


def test_an_empty_mask_has_no_outline_and_a_full_one_a_closed_one(gallery: Gallery, tmp_path: Path) -> None:
    for mask, count in ((np.zeros((6, 8), bool), 0), (np.ones((6, 8), bool), 4)):
        sites = tuple(replace(held, examples=(replace(held.examples[0], mask=mask),)) for held in gallery.sites)
        page = written(replace(gallery, sites=sites), tmp_path)
        assert page.count('<svg viewBox="0 0 8 6"') == count


def test_a_row_a_site_and_how_far_they_are_apart(gallery: Gallery, tmp_path: Path) -> None:
    page = " ".join(written(gallery, tmp_path).split())
    assert re.findall(r'<th scope="row"><strong>(.*?)</strong>', page) == ["A", "B"]
    assert "7 training images" in page and "a scanner" in page and "every image is synthetic" in page
    # deviations over sites 1 and 2: root of (1 + 4) / 2
    assert spread(gallery.sites, 0) == pytest.approx(2.5**0.5) and spread(gallery.sites, 1) == 0
    assert "1.581 as read, 0.000 after the amplitude step" in page


def test_nothing_is_loaded_from_elsewhere_and_names_are_escaped(gallery: Gallery, tmp_path: Path) -> None:
    hostile = replace(gallery.sites[0], name=HOSTILE, source=HOSTILE)
    page = written(replace(gallery, name=HOSTILE, sites=(hostile, gallery.sites[1])), tmp_path)
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.search(r"<(link|iframe|object|image)\b|@import|url\((?!#)", page)
    for value in re.findall(r'\b(?:src|href|xlink:href|data|poster)="([^"]*)"', page):
        assert value.startswith(("#", "data:image/png;base64,"))
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_equal_arrays_give_equal_pages(gallery: Gallery, tmp_path: Path) -> None:
    assert written(gallery, tmp_path) == written(gallery, tmp_path)


@pytest.mark.filterwarnings("error")
def test_one_step_and_one_site_have_a_page(gallery: Gallery, tmp_path: Path) -> None:
    only = gallery.sites[0]
    alone = replace(only, examples=(replace(only.examples[0], images=only.examples[0].images[:1]),))
    alone = replace(alone, profiles=only.profiles[:1])
    page = written(replace(gallery, steps=STEPS[:1], sites=(alone,)), tmp_path)
    assert len(pictures(page)) == 1


def test_pairs_of_few_sites_have_their_distances(gallery: Gallery) -> None:
    # root mean square of 2 and 4, and of nothing after the step
    assert pair_distances(gallery) == [("A", ["–", "3.16 → 0.00"]), ("B", ["3.16 → 0.00", "–"])]
    many = tuple(replace(gallery.sites[0], name=str(number)) for number in range(9))
    assert pair_distances(replace(gallery, sites=many)) == []
    assert pair_distances(replace(gallery, sites=gallery.sites[:1])) == []
