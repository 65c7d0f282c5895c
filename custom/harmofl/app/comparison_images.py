"""Example images of every site for a comparison's page, taken through the steps of a method that has them all."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmofl.app.gallery import collect_gallery
from harmofl.app.job import Job
from harmofl.evidence.gallery import Gallery
from harmofl.tasks import load_task, resolve_experiment


def example_images(
    job: Job, roots: Mapping[str, Path], methods: Sequence[str], seed: int, overrides: Mapping[str, Any]
) -> Gallery:
    """One image a site and its amplitude profiles, before and after each step.

    Args:
        job: the job.
        roots: of the sites' data; empty for demo data, which is written anew.
        methods: the first one with an amplitude step shows all steps.
        seed: of the demo data and the split.
        overrides: what the command sets.

    Raises:
        DataRootError, JobError: see `harmofl.app.gallery.collect_gallery`.
    """
    jobs = [Job.read(job.folder, {**overrides, "method": method, "seed": seed}) for method in methods]
    experiments = [resolve_experiment(held.settings, demo=not roots) for held in jobs]
    chosen = next((held for held in experiments if held.amplitude.region != "off"), experiments[0])
    with tempfile.TemporaryDirectory(prefix="harmofl-") as place:
        folder = Path(place)
        if not roots:
            for site in job.sites:
                load_task(chosen).write_demo(folder / "data" / site, site, chosen)
        gallery = collect_gallery(roots or folder / "data", job.sites, chosen, folder / "cache")
    sites = tuple(dataclasses.replace(site, examples=site.examples[:1]) for site in gallery.sites)
    return dataclasses.replace(gallery, sites=sites)
