"""Small folders in the layout of Camelyon17-WILDS."""

from pathlib import Path

from PIL import Image

from harmofl.data.patch_index import PatchIndex, read_index

HEADER = ",patient,node,x_coord,y_coord,tumor,slide,center,split"


def write_index(folder: Path, *lines: str, header: str = HEADER) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metadata.csv").write_text("\n".join([header, *lines]) + "\n")
    return folder


def row(number: int, patient: str = "004", tumor: int = 0, slide: str = "0", *, center: int = 0, split: int = 0) -> str:
    return f"{number},{patient},1,{number},{2 * number},{tumor},{slide},{center},{split}"


def write_site(folder: Path, count: int) -> PatchIndex:
    """Patches of 6 x 8 pixels, ten of a patient; each color tells the row, even rows are normal."""
    lines = [row(number, f"{number // 10:03d}", tumor=number % 2) for number in range(count)]
    index = read_index(write_index(folder, *lines), [0])
    for number in range(count):
        path = folder / index.name(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (8, 6), (number, 0, 255, 255)).save(path)
    return index
