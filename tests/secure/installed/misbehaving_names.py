"""A server that lets every question about names pass; on every participant's PYTHONPATH, named by one drill's job."""

from typing import Any

from harmofl.flare import site
from harmofl.flare.controller import HarmoFLScatterAndGather


class CuriousScatterAndGather(HarmoFLScatterAndGather):
    """Our workflow without the server's own refusal of what is a hospital's to say."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Leave it to the sites to refuse."""
        site.site_owned_problem = lambda settings: ""  # type: ignore[assignment]  # in the server's process alone
        super().__init__(*args, **kwargs)
