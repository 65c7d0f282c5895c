"""Limits of a hospital in a rehearsal: two sites and a patient of data are enough, and scores leave case by case."""

from harmofl.flare.site_settings import LimitSettings, SiteSettings

REHEARSAL = {"minimum_sites": 1, "training_patients": 1, "scored_patients": 1, "case_scores": True}
LOOSE = SiteSettings(limits=LimitSettings.model_validate(REHEARSAL))
