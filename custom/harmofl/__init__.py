"""HarmoFL for hospitals: federated medical imaging on NVIDIA FLARE."""

__version__ = "0.1.0"
