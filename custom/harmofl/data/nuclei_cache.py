"""Images of nuclei of one site, each decoded and its outlines drawn once."""

from collections.abc import Sequence
from pathlib import Path

from harmofl.data.decoded import Decoded, DecodedCache
from harmofl.data.nuclei import NUCLEUS, NucleiCase, NucleiImage, read_nuclei

PIPELINE_VERSION = 2  # raise it whenever the same files would give other pixels, labels or findings


class NucleiCache:
    """What `read_nuclei` gives, kept on the site's own disk.

    Args:
        folder: of the site's cache of decoded files.
    """

    def __init__(self, folder: Path) -> None:
        self._decoded = DecodedCache(folder)

    def read(self, case: NucleiCase, classes: Sequence[str] = (NUCLEUS,)) -> NucleiImage:
        """Return the case from the cache, or decode and keep it.

        Raises:
            CaseError: if the case cannot be used; this too is remembered.
            DataRootError: if the cache lies in the folder of the case.
        """

        def decode() -> Decoded:
            image = read_nuclei(case, classes)
            return Decoded({"image": image.image, "target": image.target}, findings=image.findings)

        recipe = ["nuclei", PIPELINE_VERSION, list(classes), case.image.name, case.annotation.name]
        held = self._decoded.read(recipe, (case.image, case.annotation), decode)
        return NucleiImage(case.name, case.patient, held.arrays["image"], held.arrays["target"], held.findings)
