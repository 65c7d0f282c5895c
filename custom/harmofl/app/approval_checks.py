"""What preflight says about a site's approval of jobs."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from harmofl.app.job import Job
from harmofl.app.kit import Check, Kit, read_json
from harmofl.flare.approval import app_digests, decisions, job_hash, read_decision
from harmofl.flare.deployer import ApprovedJobDeployer
from harmofl.flare.site import SiteError, own_setting
from harmofl.sections import ExperimentError

DEPLOYER = f"{ApprovedJobDeployer.__module__}.{ApprovedJobDeployer.__qualname__}"


def check_approval(kit: Kit, job: Job | None) -> Iterator[Check]:
    """Whether each privacy scope asks for approval, FLARE will ask, and the job has it."""
    local = kit.folder / "local"
    try:
        names = Counter(str(scope.get("name")) for scope in kit.scopes())
        for name in (name for name, count in names.items() if count > 1):
            raise SiteError("site_settings", f"local/privacy.json: has two scopes of the name {name}")
        asked = {str(scope.get("name")): _is_asked(scope) for scope in kit.scopes()}
        if not any(asked.values()):
            yield Check("ok", "approval", "jobs run without approval, as privacy.json says")
            return
        yield from _component(kit)
        for name in (name for name, is_asked in asked.items() if not is_asked):
            message = f"scope {name} asks for none, and a job may choose it"
            yield Check("warning", "approval", message, 'write "approval": "required" into its properties')
        yield Check("ok", "approval", f"is required; {len(decisions(local))} decided about, see harmofl approve KIT")
        if job is not None and kit.name in job.sites:
            yield _of_job(kit, job)
    except SiteError as error:
        yield Check("error", "approval", str(error))


def _is_asked(scope: Mapping[str, Any]) -> bool:
    properties = scope.get("properties")
    # this property alone: what is wrong with another one has a section of its own
    return bool(own_setting(properties if isinstance(properties, dict) else {}, "approval") == "required")


def _component(kit: Kit) -> Iterator[Check]:
    """FLARE takes every job in, and imports its code, where the kit does not list who is asked."""
    path = kit.local_file("resources.json")
    listed = read_json(path).get("components")
    held = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
    if not any(part.get("id") == "app_deployer" and part.get("path") == DEPLOYER for part in held):
        message = f"components lack app_deployer, {DEPLOYER}, so a job's code would run before anybody is asked"
        yield Check("error", path.name, message, "provisioning/site/prepare_kit.py adds it; then restart the site")


def _of_job(kit: Kit, job: Job) -> Check:
    command = f"harmofl approve {kit.folder} {job.folder}"
    name = job.meta.get("scope")
    scope = next((scope for scope in kit.scopes() if scope.get("name") == name), {}) if name else kit.scope()
    if not _is_asked(scope):
        return Check("ok", "approval", f"this job runs without, in scope {name}")
    app = next(app for app, names in job.meta["deploy_map"].items() if kit.name in names)
    try:
        held = read_decision(kit.folder / "local", job_hash(app_digests(job.folder / app), job.meta))
    except ExperimentError as error:
        return Check("error", "approval", f"this job cannot be approved: {error}")
    if held is None:
        return Check("error", "approval", "this job is not approved, or was changed since", f"look at it: {command}")
    if held.decision == "rejected":
        return Check("error", "approval", f"this job was rejected by {held.decided_by} at {held.decided_at}")
    return Check("ok", "approval", f"this job was approved by {held.decided_by} at {held.decided_at}")
