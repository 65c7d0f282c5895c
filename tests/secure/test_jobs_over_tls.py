"""Drills: who may submit what, over mutually authenticated connections."""

import hashlib
import json
import re

import pytest
import torch

from tests.secure.conftest import SITES, Drill, Lead, Outcome
from tests.secure.consortium import LEAD, MEMBER, SERVER, Consortium

pytestmark = pytest.mark.slow


def test_the_lead_gets_the_servers_model(undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """Lead submits a job: it completes, and the model that the lead downloads is the server's."""
    assert undisturbed.code == 0, undisturbed.lines
    stored = consortium.kit(SERVER) / "harmofl" / "runs" / undisturbed.job_id / "FL_global_model.pt"
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (stored, undisturbed.server / stored.name)}
    assert digests == {undisturbed.results.model_sha256["FL_global_model.pt"]}
    rounds = [line for line in undisturbed.lines if line.startswith("round")]
    assert [line.split(",")[0] for line in rounds] == [f"round {n}: 3 of 3 sites accepted" for n in range(3)]
    drill.saw(
        f"{undisturbed.lines[-1].split()[-1]}; {rounds[-1]}; one SHA-256 at server and lead: {digests.pop()[:12]}"
    )


def test_no_name_of_a_case_leaves_a_site(undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """A job's logs: no name of a case or its folder at the server or in the lead's download, nor in a site's general
    logs.
    """
    data = consortium.folder / "data"
    cases = sorted({re.match(r"Case\d+", path.name)[0] for path in (data / "HK").iterdir()})  # type: ignore[index]
    places = [undisturbed.folder, *(consortium.kit(name) for name in (SERVER, *SITES))]
    files = [
        path for place in places for path in place.rglob("*") if path.suffix in (".txt", ".json", ".html", ".jsonl")
    ]
    read = [path for path in files if "local" not in path.parts and path.name != "findings.txt"]
    texts = {path: path.read_text(errors="replace") for path in read}
    named = [path for path, text in texts.items() if any(case in text for case in cases) or str(data) in text]
    assert len(cases) == 8 and len(read) > 20 and not named
    drill.saw(f"none of {len(cases)} names in {len(read)} files")


def test_a_member_may_not_submit(lead: Lead, consortium: Consortium, drill: Drill) -> None:
    """Member submits: refused."""
    bundle = lead.bundle()
    refused = consortium.run(
        "nvflare.cli", "job", "submit", "-j", str(bundle), "--startup-kit", str(consortium.kit(MEMBER)), check=False
    )
    assert refused.returncode == 2 and "not authorized for the action 'submit_job" in refused.stdout
    drill.saw(next(line for line in refused.stdout.splitlines() if "not authorized" in line)[:160])


def test_a_site_without_byoc_refuses_a_bundled_job(lead: Lead, drill: Drill) -> None:
    """Site with BYOC off gets a bundled job: refused there, by name; the pre-installed one of the first row ran
    there.
    """
    outcome = lead.run(lead.bundle(code=True))
    assert outcome.code == 1 and "HK" in outcome.lines[-1] and "BYOC not permitted" in outcome.lines[-1]
    drill.saw(outcome.lines[-1])


def test_the_same_job_again_starts_from_nothing_old(undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """Same job submitted again, by FLARE's recipe API: starts from nothing old, same model, another run."""
    script = (
        "from nvflare.recipe import ProdEnv\nfrom harmofl.flare.recipe import HarmoFLRecipe\n"
        f"recipe = HarmoFLRecipe(job={str(next(consortium.folder.glob('job_*/dist/job')))!r})\n"
        f"env = ProdEnv(startup_kit_location={str(consortium.kit(LEAD))!r}, username={LEAD!r}, login_timeout=20)\n"
        "run = recipe.execute(env)\nprint('RESULT', run.get_result())\n"
    )
    path = consortium.folder / "again.py"
    path.write_text(script)
    finished = consortium.script(path)
    folder = re.search(r"RESULT (\S+)", finished.stdout)
    assert folder, finished.stdout
    again = Outcome("", 0, [], undisturbed.folder.__class__(folder[1]))
    assert again.results.run_id != undisturbed.results.run_id
    assert equal_models(again, undisturbed)
    assert [record.model_sha256 for record in again.rounds] == [record.model_sha256 for record in undisturbed.rounds]
    drill.saw(f"run {again.results.run_id[:8]} after {undisturbed.results.run_id[:8]}, equal weights in every round")


def test_purge_removes_a_run(undisturbed: Outcome, consortium: Consortium, drill: Drill) -> None:
    """`harmofl purge` at a site: the state of that run is gone, that of others and the data stay."""
    kit = consortium.kit("HK")
    before = {path.name for path in (kit / "harmofl" / "state").iterdir()}
    held = sorted(path.name for path in (consortium.folder / "data" / "HK").iterdir())
    said = consortium.harmofl("purge", str(kit), undisturbed.job_id).stdout
    after = {path.name for path in (kit / "harmofl" / "state").iterdir()}
    assert before - after == {undisturbed.results.run_id}
    assert sorted(path.name for path in (consortium.folder / "data" / "HK").iterdir()) == held
    drill.saw(said.strip().splitlines()[-1].replace(str(kit), "KIT"))


def equal_models(one: Outcome, other: Outcome) -> bool:
    """Whether two jobs ended with the same weights, bit for bit."""
    first, second = (
        torch.load(outcome.server / "FL_global_model.pt", weights_only=True)["model"] for outcome in (one, other)
    )
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a2_a_clone_of_a_job_keeps_its_right_to_run(undisturbed: Outcome, consortium: Consortium, lead: Lead) -> None:
    """A pre-installed job, cloned at the server: same model, also at the site that lets no job bring its code."""
    said = consortium.run(
        "nvflare.cli",
        *("--format", "json", "job", "clone", undisturbed.job_id, "--startup-kit", str(consortium.kit(LEAD))),
    ).stdout
    new_id = str(json.loads(said[said.index("{") :])["data"]["new_job_id"])
    outcome = lead.watch(new_id)
    assert outcome.code == 0 and new_id != undisturbed.job_id, outcome.lines
    assert equal_models(outcome, undisturbed)
