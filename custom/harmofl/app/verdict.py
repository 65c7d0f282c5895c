"""Did every site take part to the end? Read from what a run left, since FLARE's exit code does not tell."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harmofl.app.simulator import FATAL, Ending, LoggedError, logged_errors
from harmofl.data.findings import count_text
from harmofl.evidence.results import RESULTS_FILE, ROUNDS_FILE, Results, ResultsError, read_results, read_rounds
from harmofl.job_folder import SERVER

MODEL_FILES = ("FL_global_model.pt", "best_FL_global_model.pt")


@dataclass(frozen=True)
class Failure:
    """Where a run failed first, and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        """`site BIDMC: reason`."""
        return f"{'' if self.place == SERVER else 'site '}{self.place}: {self.reason}"


def run_folder(workspace: Path) -> Path:
    """The server's run folder, which holds models and results."""
    return workspace / SERVER / "simulate_job" / "app_server"


def judge(workspace: Path, sites: Sequence[str], ending: Ending) -> Failure | None:
    """The first failure of a run, or None where exit code, logs and evidence all say that every site did its part."""
    errors = logged_errors(workspace)
    refusals = [found for error in errors if (found := _refusal(error, sites))]
    missing = _missing_evidence(run_folder(workspace), sites)
    if ending.code == 0 and not refusals and missing is None:
        return None
    if ending.stalled is not None:
        note = f"its log stood still longest and no log moved for {ending.seconds} s, so the run was ended"
        return refusals[0] if refusals else Failure(ending.stalled, note)
    return _first_failure(errors, refusals, sites) or missing or Failure(SERVER, f"FLARE exits with {ending.code}")


def _refusal(error: LoggedError, sites: Sequence[str]) -> Failure | None:
    """What the server wrote about a site that could not do a task or whose answer it did not take."""
    named = re.match(
        r"(?P<site>[\w-]+)(?: failed:|: (?=contribution refused|answer to \w+ refused)) *(?P<reason>.*)", error.message
    )
    if error.place == SERVER and named and named["site"] in sites:
        return Failure(named["site"], named["reason"])
    return None


def _first_failure(errors: list[LoggedError], refusals: list[Failure], sites: Sequence[str]) -> Failure | None:
    """The first error by time; in the server's words, which carry a code, where it wrote about the same site."""
    if not errors:
        return None
    first = _attributed(errors[0], sites)
    return next((refusal for refusal in refusals if refusal.place == first.place), first)


def _attributed(error: LoggedError, sites: Sequence[str]) -> Failure:
    """The site that an error of the server's log is about, else whose log it is."""
    reason = re.sub(rf"^{FATAL} due to \S+ received: ", "", error.message)
    if error.place != SERVER:
        return Failure(error.place, reason)
    named = re.search(rf"\bclient (?P<site>{'|'.join(map(re.escape, sites))})\b", reason)
    if named:
        return Failure(named["site"], f"its process ended before its work was done ({reason.rstrip(': ')})")
    named_sites = set(re.findall(rf"\b({'|'.join(map(re.escape, sites))})(?: failed|: )", reason))
    return Failure(named_sites.pop() if len(named_sites) == 1 else SERVER, reason)


def _missing_evidence(folder: Path, sites: Sequence[str]) -> Failure | None:
    """What a complete run leaves and this one did not."""
    try:
        results, rounds = read_results(folder / RESULTS_FILE), read_rounds(folder / ROUNDS_FILE)
    except ResultsError as error:
        return Failure(SERVER, str(error))
    kept_apart = results.experiment.get("federation", {}).get("local_layers") == "all"
    for name in () if kept_apart else MODEL_FILES:  # every site trained a model of its own
        path = folder / name
        if not path.is_file():
            return Failure(SERVER, f"{path} is missing")
        if hashlib.sha256(path.read_bytes()).hexdigest() != results.model_sha256.get(name):
            return Failure(SERVER, f"{path} is not the file that {RESULTS_FILE} names")
    if len(rounds) != results.rounds:
        return Failure(SERVER, f"{len(rounds)} of {count_text(results.rounds, 'round')} were closed")
    for record in rounds:
        for site in sites:
            if site not in record.sites_accepted:
                reason = record.sites_refused.get(site, "no answer")
                return Failure(site, f"not in the mean of round {record.round}: {reason}")
    return next((Failure(site, "no test scores came back") for site in sites if not _was_tested(results, site)), None)


def _was_tested(results: Results, site: str) -> bool:
    """Whether scores came back, be it undefined ones."""
    held = results.sites.get(site)
    return held is not None and results.key_score in held.test
