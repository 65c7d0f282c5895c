"""One consortium for all drills, and the table that they fill: drill, expected, seen."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harmofl.evidence.results import Results, RoundRecord, read_results, read_rounds
from tests.federation.conftest import make_job
from tests.secure.consortium import LEAD, PROVISIONING, SERVER, Consortium

# eight cases a site leave one for validation; two sites suffice for some drills, and some must last
DRILL_LIMITS = ["minimum_sites=2", "training_patients=1", "scored_patients=1", "local_epochs=2000"]
SITES = ("BIDMC", "HK", "UCL")  # BMC has a kit, too, but never starts: drills start copies of its kit
ROUNDS = 3
_table: list[tuple[str, str, str]] = []


@dataclass
class Drill:
    """A row of the table."""

    expected: str
    seen: list[str] = field(default_factory=list)

    def saw(self, text: str) -> None:
        """Note what happened, in the words of whoever said it."""
        self.seen.append(" ".join(text.split()))


@pytest.fixture
def drill(request: pytest.FixtureRequest) -> Iterator[Drill]:
    """The row of a test: its docstring says what is drilled and, after the colon, what is expected."""
    name, _, expected = " ".join((request.function.__doc__ or "").split()).rstrip(".").partition(": ")
    row = Drill(expected)
    yield row
    failed = getattr(request.node, "failed", False)
    _table.append((name, expected, ("FAILED; " if failed else "") + "; ".join(row.seen)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let the fixture know how its test ended."""
    outcome: Any = yield
    if outcome.get_result().failed:
        item.failed = True  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    if _table:
        terminalreporter.section("drills")
        terminalreporter.write_line("| drill | expected | seen |\n|---|---|---|")
        for row in _table:
            terminalreporter.write_line("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |")


@dataclass(frozen=True)
class Outcome:
    """A job that has ended, as the lead saw it."""

    job_id: str
    code: int
    lines: list[str]
    folder: Path

    @property
    def server(self) -> Path:
        return self.folder / "workspace" / "app_server"

    @property
    def results(self) -> Results:
        return read_results(self.server / "results.json")

    @property
    def rounds(self) -> list[RoundRecord]:
        return read_rounds(self.server / "round_metrics.jsonl")


class Lead:
    """The lead, who bundles jobs, submits and watches them."""

    def __init__(self, consortium: Consortium) -> None:
        self.consortium = consortium
        self._jobs = 0

    def bundle(
        self,
        overrides: dict[str, Any] | None = None,
        *,
        executor: str | None = None,
        controller: str | None = None,
        code: bool = False,
    ) -> Path:
        """A small job on the consortium's sites, pre-installed unless it brings its code."""
        self._jobs += 1
        folder = self.consortium.folder / f"job_{self._jobs}"
        folder.mkdir()
        # a busy machine delays a site by many seconds: nobody is left behind unless the drill is about that
        settings = {"federation.rounds": ROUNDS, "federation.straggler_wait": 600, "demo.data.cases": 8}
        settings |= overrides or {}
        job = make_job(folder, SITES, settings, executor=executor, controller=controller)
        options = [] if code else ["--preinstalled"]
        self.consortium.harmofl("bundle", str(job), "-o", str(folder / "dist"), "--demo", *options)
        return folder / "dist" / "job"

    def submit(self, bundle: Path, user: str = LEAD) -> str:
        """Submit as `nvflare job submit` does and return the job's id."""
        finished = self.consortium.run(
            "nvflare.cli",
            *("--format", "json", "job", "submit", "-j", str(bundle), "--startup-kit", str(self.consortium.kit(user))),
        )
        return str(json.loads(finished.stdout[finished.stdout.index("{") :])["data"]["job_id"])

    def watch(self, job_id: str, user: str = LEAD) -> Outcome:
        """Follow a job to its end and download it."""
        results = self.consortium.folder / "results"
        finished = self.consortium.harmofl(
            "watch", str(self.consortium.kit(user)), job_id, "-o", str(results), check=False
        )
        lines = [line.removeprefix("harmofl watch: ") for line in finished.stdout.splitlines()]
        return Outcome(job_id, finished.returncode, lines, results / job_id)

    def run(self, bundle: Path) -> Outcome:
        """Submit and watch."""
        return self.watch(self.submit(bundle))


@pytest.fixture(scope="session")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Consortium]:
    """Server and three sites with data, running; HK lets no job bring its code."""
    held = Consortium(tmp_path_factory.mktemp("consortium"), [*SITES, "BMC"])
    job = make_job(held.folder, SITES, {})
    held.harmofl("demo-data", str(job), "-o", str(held.folder / "data"), "--set", "demo.data.cases=8")
    prepare(held, SERVER)
    for site in SITES:
        prepare(held, site, data_root=held.folder / "data" / site, preinstalled=site == "HK")
    try:
        held.start(SERVER, loop=True)
        held.start(*SITES)
        held.wait_until_registered(*SITES)
        yield held
    finally:
        held.stop()


def prepare(consortium: Consortium, name: str, **settings: Any) -> None:
    """Set a kit up as its hospital does, and let the classes of these drills in."""
    sys.path.insert(0, str(PROVISIONING / "site"))
    from prepare_kit import prepare_kit

    limits = [] if name == SERVER else DRILL_LIMITS
    prepare_kit(consortium.kit(name), force=True, **{"limits": limits, **settings})
    path = consortium.kit(name) / "local" / "resources.json"
    resources = json.loads(path.read_text())
    resources["class_allow_list"].append("misbehaving.")
    resources["class_allow_list"].append("misbehaving_headers.")
    resources["class_allow_list"].append("misbehaving_names.")
    resources["class_allow_list"].append("malformed.")
    resources["class_allow_list"].append("misbehaving_norms.")
    path.write_text(json.dumps(resources))


@pytest.fixture(scope="session")
def lead(consortium: Consortium) -> Lead:
    """The lead of the consortium."""
    return Lead(consortium)


@pytest.fixture(scope="session")
def undisturbed(lead: Lead) -> Outcome:
    """A job that nothing happens to; what is interrupted and resumed must end with the same model."""
    return lead.run(lead.bundle())


def last_lines(text: str, *marks: str) -> str:
    """The last line of a log that holds one of the marks, without time and logger."""
    found = [line for line in text.splitlines() if any(mark in line for mark in marks)]
    return found[-1].split(" - ")[-1].strip() if found else "nothing"


def sites_of(records: Sequence[RoundRecord]) -> list[list[str]]:
    """Which sites entered each round."""
    return [record.sites_accepted for record in records]
