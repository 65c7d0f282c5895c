"""Which changes of the code no test notices? A seeded sample of mutants, each run with the tests of its file.

    pip install -r tests/benchmarks/requirements-mutation.txt
    python -m tests.benchmarks.mutations results.jsonl [--sample 400] [--seed 0] [--limit N] [--report]

cosmic-ray makes the mutants of core/, tasks/, the split, the best round and the aggregation: a place in a file is
drawn, in proportion to the places of each file, then one of the changes that can be made there. Each runs in a copy of
the tracked files, never in the checkout, two at a time, with the tests named below, until the first failure or a time
limit of five times what they take without a change. Every result is a line of the file; a call with the same file goes
on where the last one ended. At the end: outcomes by file, and the survivors with their change.
"""

import argparse
import ast
import contextlib
import difflib
import hashlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "custom/harmofl"
SLACK, LEAST = 5.0, 60.0  # times the duration without a change; seconds
AT_ONCE = 2
# Tests by file, below tests/; a file of the folders named here that is missing is an error.
TESTS: dict[str, tuple[str, ...]] = {
    "core/aggregation.py": (
        "unit/core/test_aggregation.py",
        "unit/core/test_aggregation_refusals.py",
        "unit/core/test_partial_sum.py",
    ),
    "core/amplitude_limits.py": ("unit/core/test_amplitude_limits.py",),
    "core/amplitude.py": (
        "unit/core/test_amplitude_normalization.py",
        "unit/core/test_amplitude_running.py",
        "unit/core/test_contrast.py",
    ),
    "core/augmentation.py": ("unit/core/test_augmentation.py", "unit/core/test_parallel.py"),
    "core/best_round.py": ("unit/flare/test_best_round.py",),
    "core/classification.py": ("unit/core/test_classification.py",),
    "core/clustered.py": ("unit/core/test_clustered.py",),
    "core/contrast.py": ("unit/core/test_contrast.py",),
    "core/contributions.py": ("unit/core/test_aggregation_refusals.py", "unit/core/test_aggregation.py"),
    "core/coordinatewise.py": ("unit/core/test_coordinatewise.py",),
    "core/deployed.py": ("unit/core/test_deployed.py",),
    "core/device_kinds.py": ("unit/core/test_device_kinds.py",),
    "core/direction.py": ("unit/core/test_direction.py",),
    "core/distances.py": ("unit/core/test_distances.py",),
    "core/drift.py": ("unit/core/test_drift.py",),
    "core/entry_groups.py": ("unit/core/test_aggregation.py", "unit/core/test_aggregation_refusals.py"),
    "core/exchange.py": ("unit/core/test_exchange.py", "unit/flare/test_rounded_model.py"),
    "core/gaussian_mechanism.py": ("unit/core/test_gaussian_mechanism.py",),
    "core/grid_sum.py": ("unit/core/test_grid_sum.py", "unit/core/test_aggregation.py"),
    "core/instance_norm.py": ("unit/core/test_instance_norm.py",),
    "core/kept_memory.py": ("unit/core/test_kept_memory.py",),
    "core/landscape.py": ("unit/core/test_landscape.py",),
    "core/layout.py": ("unit/core/test_instance_norm.py",),
    "core/loading.py": ("unit/core/test_loading.py", "unit/core/test_parallel.py"),
    "core/loss_terms.py": ("unit/core/test_loss_terms.py",),
    "core/losses.py": ("unit/core/test_losses.py",),
    "core/networks.py": ("unit/core/test_networks.py",),
    "core/norm_rule.py": ("unit/core/test_norm_rule.py", "unit/flare/test_round_norms.py"),
    "core/optimizers.py": ("unit/core/test_optimizers.py",),
    "core/paired.py": ("unit/core/test_paired.py",),
    "core/parallel.py": ("unit/core/test_parallel.py", "unit/core/test_parallel_rounds.py"),
    "core/partition.py": ("unit/core/test_partition.py",),
    "core/partial_sum.py": ("unit/core/test_partial_sum.py",),
    "core/perturbation.py": (
        "unit/core/test_perturbation.py",
        "unit/core/test_perturbation_passes.py",
        "unit/core/test_perturbation_on_device.py",
    ),
    "core/radial.py": ("unit/core/test_amplitude_spectra.py", "oracle", "unit/core/test_deployed.py"),
    "core/released_sets.py": ("unit/core/test_released_sets.py", "unit/flare/test_releases.py"),
    "core/scores.py": ("unit/core/test_scores.py",),
    "core/server_rules.py": ("unit/core/test_server_rules.py", "unit/flare/test_generator.py"),
    "core/spectra.py": ("unit/core/test_amplitude_spectra.py", "oracle"),
    "core/training.py": (
        "unit/core/test_training.py",
        "unit/core/test_training_presets.py",
        "unit/core/test_training_repeated.py",
        "unit/core/test_training_prediction.py",
        "unit/core/test_training_targets.py",
    ),
    "tasks/__init__.py": ("unit/tasks/test_tasks.py",),
    "tasks/answers.py": ("unit/tasks", "unit/flare/test_participant.py"),
    "tasks/at_hospital.py": ("unit/flare/test_names_of_patients.py",),
    "tasks/camelyon17.py": (
        "unit/tasks/test_camelyon17_task.py",
        "unit/tasks/test_camelyon17_places.py",
        "unit/tasks/test_illustrations.py",
        "unit/tasks/test_tasks.py",
    ),
    "tasks/nuclei.py": (
        "unit/tasks/test_nuclei_task.py",
        "unit/tasks/test_nuclei_scores.py",
        "unit/tasks/test_illustrations.py",
        "unit/tasks/test_tasks.py",
    ),
    "tasks/prostate.py": (
        "unit/tasks/test_prostate_scores.py",
        "unit/tasks/test_tasks.py",
        "unit/tasks/test_illustrations.py",
        "unit/flare/test_participant.py",
    ),
    "tasks/single_images.py": (
        "unit/tasks/test_single_images.py",
        "unit/tasks/test_nuclei_scores.py",
        "unit/app/test_predict.py",
        "unit/app/test_evaluate.py",
    ),
    "tasks/whole_site.py": ("unit/tasks/test_whole_site.py", "unit/app/test_evaluate.py"),
    "data/splits.py": ("unit/data/test_splits.py",),
    "flare/aggregator.py": ("unit/flare/test_aggregator.py", "unit/flare/test_amplitude_gathering.py"),
    "flare/generator.py": ("unit/flare/test_generator.py", "unit/flare/test_server_methods.py"),
    "flare/persistor.py": (
        "unit/flare/test_best_round.py",
        "unit/flare/test_server_run.py",
        "unit/flare/test_server_methods.py",
    ),
}
WHOLE_FOLDERS = ("core", "tasks")


@dataclass(frozen=True)
class Mutant:
    """One change of one file; `line` counts from 1."""

    file: str
    operator: str
    occurrence: int
    line: int

    @property
    def name(self) -> str:
        """What stays the same while file and seed do."""
        return f"{self.file}:{self.line} {self.operator.partition('/')[2]} {self.occurrence}"


@dataclass(frozen=True)
class Result:
    """What the tests said; `source` is the SHA-256 of the file without the change."""

    mutant: str
    file: str
    source: str
    outcome: str
    seconds: float
    said: str
    change: str


def mutants_of(file: str, source: str) -> dict[tuple[str, Any], list[Mutant]]:
    """By place, told by the kind of change and its position, the changes that can be made in a file.

    Annotations are left out: a change there fails when the file is imported, whatever the tests.
    """
    nodes, unread = list(ast_nodes(get_ast(source))), _annotations(source)
    places: dict[tuple[str, Any], list[Mutant]] = defaultdict(list)
    for name in sorted(operator_names()):
        if get_operator(name).arguments():  # those that insert variables of a model of causes
            continue
        operator, count = get_operator(name)(), 0
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                if not any(first <= start and end <= last for first, last in unread):
                    kind = name.partition("_")[0]
                    places[kind, (start, end)].append(Mutant(file, name, count, start[0]))
                count += 1
    return places


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand, from and to (line, column)."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
    return [
        ((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0))
        for one in found
        if one is not None
    ]


def drawn_sample(size: int, seed: int) -> list[Mutant]:
    """A sample stratified by file, in the order in which it is run: mixed, so that a part of it is one as well."""
    generator = random.Random(seed)
    places = {file: mutants_of(file, (ROOT / PACKAGE / file).read_text()) for file in sorted(TESTS)}
    total = sum(map(len, places.values()))
    shares = {file: size * len(held) / total for file, held in places.items()}
    counts = {file: int(share) for file, share in shares.items()}
    by_rest = sorted(shares, key=lambda file: counts[file] - shares[file])
    for file in by_rest[: size - sum(counts.values())]:
        counts[file] += 1
    sample = [
        generator.choice(places[file][place])
        for file, count in counts.items()
        for place in generator.sample(sorted(places[file]), count)
    ]
    generator.shuffle(sample)
    return sample


def copied_tree(target: Path) -> Path:
    """The tracked files of the checkout as they are now."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, told.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run_tests(tree: Path, file: str, limit: float | None) -> tuple[str, str, float]:
    """`killed`, `survived` or `timeout`; the first failing test or last line; seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [f"tests/{path}" for path in TESTS[file]]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tree / "custom"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HARMOFL_REALDATA": os.environ.get("HARMOFL_REALDATA", str(ROOT.parent / "shared" / "realdata")),
    }
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the tests' own processes too
        process.communicate()
        return "timeout", "", time.monotonic() - started
    lines = said.splitlines() or [""]
    first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return ("survived" if process.returncode == 0 else "killed"), first[:200], time.monotonic() - started


class Laboratory:
    """Copied trees, one for each thread, and how long the tests of a file take without a change."""

    def __init__(self, folder: Path) -> None:
        self._trees: queue.Queue[Path] = queue.Queue()
        for number in range(AT_ONCE):
            self._trees.put(copied_tree(folder / str(number)))
        self._limits: dict[str, float] = {}
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextlib.contextmanager
    def tree(self) -> Iterator[Path]:
        """A tree that nobody else uses."""
        tree = self._trees.get()
        try:
            yield tree
        finally:
            self._trees.put(tree)

    def limit(self, tree: Path, file: str) -> float:
        """Seconds that the tests of a file may take.

        Raises:
            RuntimeError: they fail without a change.
        """
        with self._locks[file]:
            if file not in self._limits:
                outcome, said, seconds = run_tests(tree, file, None)
                if outcome != "survived":
                    raise RuntimeError(f"{file}: its tests fail without a change: {said}")
                self._limits[file] = max(LEAST, SLACK * seconds)
            return self._limits[file]

    def result(self, mutant: Mutant) -> Result:
        """Run the tests of a mutant's file on it."""
        with self.tree() as tree:
            limit, path = self.limit(tree, mutant.file), tree / PACKAGE / mutant.file
            source = path.read_text()
            changed = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
            try:
                path.write_text(changed)
                outcome, said, seconds = run_tests(tree, mutant.file, limit)
            finally:
                path.write_text(source)
        difference = difflib.unified_diff(source.splitlines(), changed.splitlines(), mutant.file, "changed", "", "", 1)
        return Result(
            mutant.name,
            mutant.file,
            digest(source),
            outcome,
            round(seconds, 1),
            said,
            "\n".join(map(str.rstrip, difference)),
        )


def digest(source: str) -> str:
    """SHA-256 of a file's text."""
    return hashlib.sha256(source.encode()).hexdigest()


def held_results(path: Path) -> list[Result]:
    """The lines of an earlier call; a last one that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, TypeError):
            found.append(Result(**json.loads(line)))
    return found


def run_sample(sample: Sequence[Mutant], path: Path) -> None:
    """Run what has no result yet for the file as it is now, and write each result as it comes."""
    done = {(held.mutant, held.source) for held in held_results(path)}
    sources = {file: digest((ROOT / PACKAGE / file).read_text()) for file in TESTS}
    open_ones = [mutant for mutant in sample if (mutant.name, sources[mutant.file]) not in done]
    writing = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, path.open("a", encoding="utf-8") as stream:
        laboratory = Laboratory(Path(folder))

        def work(mutant: Mutant) -> None:
            result = laboratory.result(mutant)
            with writing:
                stream.write(json.dumps(asdict(result)) + "\n")
                stream.flush()
                print(f"{result.outcome:<8} {result.seconds:6.1f} s  {result.mutant}", flush=True)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for finished in [pool.submit(work, mutant) for mutant in open_ones]:
                finished.result()


def print_report(sample: Sequence[Mutant], results: Sequence[Result]) -> None:
    """Outcomes by file, then the survivors with their change."""
    names = {mutant.name for mutant in sample}
    held = {result.mutant: result for result in results if result.mutant in names}
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for result in held.values():
        by_file[result.file][result.outcome] += 1
    kinds = ("killed", "survived", "timeout")
    print(f"\n{'file':<32}" + "".join(f"{kind:>10}" for kind in kinds))
    for file, counts in sorted(by_file.items()):
        print(f"{file:<32}" + "".join(f"{counts[kind]:>10}" for kind in kinds))
    total = sum(by_file.values(), Counter())
    print(
        f"{'all ' + str(len(held)) + ' of ' + str(len(sample)):<32}" + "".join(f"{total[kind]:>10}" for kind in kinds)
    )
    for result in sorted(held.values(), key=lambda result: result.mutant):
        if result.outcome == "survived":
            print(f"\n{result.mutant}\n{result.change}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="JSON lines, one a mutant; what is there is not run again")
    parser.add_argument("--sample", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="run only so many of the sample, the first ones")
    parser.add_argument("--report", action="store_true", help="run nothing, print what is known")
    options = parser.parse_args()
    here = {f"{folder}/{path.name}" for folder in WHOLE_FOLDERS for path in (ROOT / PACKAGE / folder).glob("*.py")}
    missing = sorted(file for file in here - TESTS.keys() if len((ROOT / PACKAGE / file).read_text().splitlines()) > 1)
    if missing:
        parser.error(f"no tests are named for {', '.join(missing)}; add them to TESTS")
    sample = drawn_sample(options.sample, options.seed)
    if not options.report:
        run_sample(sample[: options.limit], options.results)
    print_report(sample, held_results(options.results))


if __name__ == "__main__":
    main()
