"""Example images of every site for a comparison's page, taken through the steps of a method that has them all."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harmofl.app.gallery import collect_gallery
from harmofl.app.job import Job
from harmofl.evidence.gallery import Gallery
from harmofl.flare.image_cache import image_cache
from harmofl.flare.shared_data import demo_folder
from harmofl.tasks import load_task, resolve_experiment


def example_images(
    job: Job,
    roots: Mapping[str, Path],
    methods: Sequence[str],
    seed: int,
    overrides: Mapping[str, Any],
    *,
    shared: Path,
) -> Gallery:
    """One image a site and its amplitude profiles, before and after each step.

    Args:
        job: the job.
        roots: of the sites' data; empty for demo data.
        methods: the first one with an amplitude step shows all steps.
        seed: of the demo data and the split.
        overrides: what the command sets.
        shared: folder in which the cells kept demo data and decoded images.

    Raises:
        DataRootError, JobError: see `harmofl.app.gallery.collect_gallery`.
    """
    jobs = [Job.read(job.folder, {**overrides, "method": method, "seed": seed}) for method in methods]
    experiments = [resolve_experiment(held.settings, demo=not roots) for held in jobs]
    chosen = next((held for held in experiments if held.amplitude.region != "off"), experiments[0])
    places, caches = dict(roots), {}
    for site in job.sites:
        if not roots:
            cases = demo_folder(shared / site, site, chosen)
            load_task(chosen).write_demo(cases, site, chosen)
            places[site] = cases.parent
        caches[site] = image_cache(shared / site / "cache", chosen)
    gallery = collect_gallery(places, job.sites, chosen, caches)
    sites = tuple(dataclasses.replace(site, examples=site.examples[:1]) for site in gallery.sites)
    return dataclasses.replace(gallery, sites=sites)
