"""The names of numbers that may leave a site: scores and reasons of the package's tasks, and what a hospital adds."""

from collections.abc import Collection, Mapping
from typing import Any

from harmofl.data.findings import count_text
from harmofl.flare.site import own_setting
from harmofl.flare.site_settings import LISTED, LimitSettings
from harmofl.flare.wire import MessageError

SCORES = frozenset({"accuracy", "accuracy_by_slide", "auroc", "dice", "published_dice", "sensitivity", "specificity"})
REASONS = frozenset(
    {
        *("annotation_too_large", "annotation_without_image", "bad_affine", "color_mode", "constant_image"),
        *("blank_image", "blank_slices"),
        *("damaged_file", "dicom", "duplicate_case", "duplicate_image", "duplicate_patch", "empty_file", "empty_mask"),
        *("excluded_patient", "first_page", "forms_disagree", "geometry_mismatch", "idle_hole"),
        *("image_leakage", "image_without_annotation", "image_without_mask", "implausible_spacing", "labels_merged"),
        *("mask_labels", "mask_not_finite", "mask_without_image", "missing_file", "missing_image", "negative_label"),
        *("no_cases", "no_cell_types", "no_organ", "no_regions", "no_voxels", "not_a_file", "not_an_image"),
        *("not_axial", "not_finite", "not_gzip", "not_imagescope", "not_nifti", "not_scalar"),
        *("not_three_dimensional", "one_label", "orientation_unknown", "other_format", "patch_leakage", "patch_size"),
        *("regions_clipped", "regions_dropped", "regions_hidden", "regions_outside", "regions_read"),
        *("self_crossing", "several_pages", "several_sites", "size_mismatch", "slice_leakage", "soft_mask"),
        *(
            "sparse_image",
            "split_changed",
            "split_filled",
            "thin_volume",
            "too_few_cases",
            "too_large",
            "too_many_labels",
        ),
        *("transparent_image", "twin_image", "unknown_class", "unreadable_annotation", "unreadable_file"),
        *("unreadable_image", "value_range", "xml_document_type", "cache_not_written", "converted_image"),
        *("axes_not_orthogonal", "bad_header", "decoder_message", "header_repaired", "padding_replaced"),
        *("scaling_ignored", "spacing_disagrees", "trailing_bytes"),
        *("all_regions_dropped", "no_region_drawn", "implausible_share", "unlike_other_masks", "nested_volumes"),
        *("mask_alpha", "mask_colors", "mask_form", "mask_ramps", "misnamed_image", "misnamed_mask"),
    }
)


def allowed_names(scope: Mapping[str, Any]) -> frozenset[str]:
    """What may leave a site, with the scope's `allowed_names` for a task of one's own.

    Raises:
        SiteError: code `allowed_names`, where it is no list of names.
    """
    return SCORES | REASONS | frozenset(own_setting(scope, "allowed_names"))


def refuse_other_names(numbers: Mapping[str, Any], allowed: Collection[str]) -> None:
    """Refuse an answer with a name that is not allowed: a patient's name would pass for one.

    Raises:
        MessageError: says where, not which.
    """
    places = ("test", "pooled", "summaries", "not_sent")
    tests = [scores for place in places for scores in numbers.get(place, {}).values()]
    reasons = {place: set(numbers.get(place, {})) for place in ("skipped", "warnings")}
    told = {**reasons, "scores": {name for scores in tests for name in scores}}
    told["limits"] = _unknown_limits(numbers.get("limits", {}))
    for place, names in told.items():
        others = names - set(allowed)
        if others:
            raise MessageError(
                f"{count_text(len(others), 'name')} among the {place} may not leave; a hospital allows "
                f"those of another "
                "task by allowed_names in local/privacy.json"
            )


def _unknown_limits(limits: Mapping[str, Any]) -> set[str]:
    """What stands among the limits in force and is neither a limit nor one of the names that limits list."""
    listed = {name for value in limits.values() if isinstance(value, list) for name in value}
    return (set(limits) - {*LimitSettings.model_fields, "minimum_cases"}) | (listed - LISTED)
