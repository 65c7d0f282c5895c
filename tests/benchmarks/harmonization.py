"""Does harmonization matter on the demo data? FedAvg on windowed intensities against FedAvg with z-score.

    python -m tests.benchmarks.harmonization --seeds 0 1 2 [--set training.local_epochs=2]

Prints, by norm layer and seed, the mean per-case foreground test Dice over the six sites after the last round, as a
Markdown table. A seed draws new patients, a new initialization and a new split.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from harmofl.experiment import parse_assignment, read_settings
from harmofl.tasks import resolve_experiment
from tests.benchmarks.federation_in_memory import scores_by_round

JOB = Path(__file__).resolve().parents[2] / "jobs" / "harmofl_prostate"
ROWS = [(norm, intensity) for norm in ("batch_stats", "instance") for intensity in ("window", "zscore")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="assignments", action="append", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = {row: [dice(row, seed, options.assignments) for seed in options.seeds] for row in ROWS}
    seeds = " | ".join(f"seed {seed}" for seed in options.seeds)
    out = [f"| norm layer | intensities | {seeds} | mean |", "|" + "---|" * (3 + len(options.seeds))]
    for (norm, intensity), values in table.items():
        cells = " | ".join(f"{value:.3f}" for value in values)
        out.append(f"| {norm} | {intensity} | {cells} | {np.mean(values):.3f} |")
    sys.stdout.write("\n".join(out) + "\n")


def dice(row: tuple[str, str], seed: int, assignments: list[str]) -> float:
    norm, intensity = row
    settings = read_settings(JOB / "app" / "config" / "experiment.json")
    overrides = settings["demo"]["overrides"]
    overrides |= dict(parse_assignment(text) for text in assignments)
    overrides |= {"method": "fedavg", "network.norm": norm, "amplitude.intensity": intensity, "seed": seed}
    experiment = resolve_experiment(json.loads(json.dumps(settings)), demo=True)
    meta = json.loads((JOB / "meta.json").read_text())
    names = [name for name in meta["deploy_map"]["app"] if name != "server"]
    with tempfile.TemporaryDirectory() as folder:
        scores = scores_by_round(experiment, names, Path(folder))
    sys.stderr.write(f"{row} seed {seed}: " + " ".join(f"{np.nanmean(list(s.values())):.3f}" for s in scores) + "\n")
    return float(np.nanmean(list(scores[-1].values())))


if __name__ == "__main__":
    main()
