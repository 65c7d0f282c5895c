"""Glue to NVIDIA FLARE."""
