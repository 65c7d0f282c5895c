"""A site's approval of jobs: what of a job is hashed, and what somebody at the site has decided about that hash."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey, get_job_meta_study
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from pydantic import ValidationError

from harmofl.files import replaced_file
from harmofl.flare.site import SiteError
from harmofl.flare.site_settings import SiteSettings, read_site_settings
from harmofl.job_folder import read_json, refuse_links, sha256
from harmofl.sections import ExperimentError, Section, first_problem, one_line, parse_json

DECISIONS = "approvals"  # folder in the kit's local/, where a site's own user may write and FLARE's need not
WAITING = "waiting_for_approval"  # folder in the site's state root, where FLARE's user writes
MOST_WAITING = 100
# FLARE writes them anew at each submission, and checks them itself; a folder of such a name is hashed
SIGNATURES = frozenset({NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE})
# What FLARE's server writes into meta.json, whatever was submitted: who, when and how far. `byoc` is derived anew at
# the site, from the app itself. Any other key is the job's, also one that is not known today.
WRITTEN_BY_FLARE = frozenset(
    key.value
    for key in (
        JobMetaKey.JOB_ID,
        JobMetaKey.JOB_FOLDER_NAME,
        JobMetaKey.SUBMITTER_NAME,
        JobMetaKey.SUBMITTER_ORG,
        JobMetaKey.SUBMITTER_ROLE,
        JobMetaKey.STATUS,
        JobMetaKey.DATA_STORAGE_FORMAT,
        JobMetaKey.CONTENT_LOCATION,
        JobMetaKey.RESULT_LOCATION,
        JobMetaKey.APPROVALS,
        JobMetaKey.SUBMIT_TIME,
        JobMetaKey.SUBMIT_TIME_ISO,
        JobMetaKey.START_TIME,
        JobMetaKey.DURATION,
        JobMetaKey.JOB_DEPLOY_DETAIL,
        JobMetaKey.SCHEDULE_COUNT,
        JobMetaKey.LAST_SCHEDULE_TIME,
        JobMetaKey.SCHEDULE_HISTORY,
        JobMetaKey.CLONED_FROM,
        JobMetaKey.JOB_CLIENTS,
    )
) | {"byoc"}
COMPILED = {".pyc", ".pyo"}
# `nvflare job submit` writes these anew, with other line breaks; FLARE reads them by json.load, and so does their hash
REWRITTEN = frozenset({"config/config_fed_client.json", "config/config_fed_server.json"})


class Decision(Section):
    """What somebody at the site decided about a job, by its hash.

    Attributes:
        decision: what was decided.
        job: name of the job, as it was shown.
        decided_at: date and time with time zone.
        decided_by: name of the user of this machine.
    """

    decision: Literal["approved", "rejected"]
    job: str
    decided_at: str
    decided_by: str


class Arrival(Section):
    """A job that came to the site and was not let in; what the server says about it, in one printable line each."""

    job: str
    job_id: str
    submitter: str
    arrived_at: str


def app_digests(app: Path, *, imported: bool = False) -> dict[str, str]:
    """SHA-256 of every file of an app by its path in it; folders have an empty one and end with a slash.

    Of files in `REWRITTEN` it is that of their JSON content, with sorted keys and without blanks between.

    Args:
        app: the app folder, as handed over or as FLARE unpacked it.
        imported: a job runs from it, so that Python may have put compiled code beside its sources.

    Raises:
        ExperimentError: it holds a link, or compiled Python code, which would run in place of a source that is shown,
            or FLARE's configuration is no JSON.
    """
    refuse_links(app)
    found: dict[str, str] = {}
    for path in sorted(app.rglob("*")):
        name, folder = path.relative_to(app).as_posix(), path.is_dir()
        if path.suffix in COMPILED or path.name == "__pycache__":
            if imported:
                continue
            raise ExperimentError(f"{name}: is compiled Python code, which nobody can read; bundle the job without it")
        if folder:
            found[f"{name}/"] = ""
        elif path.name not in SIGNATURES:
            found[name] = _content_sha256(path) if name in REWRITTEN else sha256(path)
    return found


def _content_sha256(path: Path) -> str:
    content = read_json(path, "bundle the job again", shown=path.name)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def job_hash(app: Mapping[str, str], meta: Mapping[str, Any]) -> str:
    """SHA-256 in hex digits over all that arrives at a site of a job and can change what it does there.

    That is every file of the site's app, by `app_digests`, and every key of meta.json but those that FLARE's server
    writes. A study that is not named is the default one, as for FLARE.

    Args:
        app: of `app_digests`.
        meta: content of meta.json, as handed over or as it arrived.
    """
    kept = {key: value for key, value in meta.items() if key not in WRITTEN_BY_FLARE}
    kept[JobMetaKey.STUDY.value] = get_job_meta_study(dict(meta))
    return hashlib.sha256(json.dumps({"app": dict(app), "meta": kept}, sort_keys=True).encode()).hexdigest()


def read_decision(local: Path, job: str) -> Decision | None:
    """What was decided at a site about a job.

    Args:
        local: the kit's folder local.
        job: hash of the job.

    Raises:
        SiteError: code `approval_file`, where the site's own file cannot be used.
    """
    path = local / DECISIONS / f"{job}.json"
    try:
        return Decision.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        reason = first_problem(error, Decision)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not JSON"
    raise SiteError("approval_file", f"local/{DECISIONS}: the decision about job {job[:16]} cannot be used: {reason}")


def write_decision(local: Path, job: str, decision: Decision) -> None:
    """Keep a decision, in place of an earlier one; FLARE's user may read it, and need not be able to write it."""
    folder = local / DECISIONS
    folder.mkdir(exist_ok=True)
    _write(folder / f"{job}.json", decision)


def note_arrival(state_root: Path, job: str, arrival: Arrival) -> None:
    """Keep that a job was not let in, for whoever decides; the newest hundred are kept."""
    folder = state_root / WAITING
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{job}.json", arrival)
    held = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in held[:-MOST_WAITING]:
        path.unlink(missing_ok=True)


def arrivals(state_root: Path) -> dict[str, Arrival]:
    """Jobs that were not let in, by hash, the newest last; what cannot be read is left out."""
    found = {}
    for path in sorted((state_root / WAITING).glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            found[path.stem] = Arrival.model_validate(parse_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return found


def decisions(local: Path) -> dict[str, Decision]:
    """All decisions of a site by hash, the newest last.

    Raises:
        SiteError: see `read_decision`.
    """
    found = {path.stem: read_decision(local, path.stem) for path in sorted((local / DECISIONS).glob("*.json"))}
    held = {job: decision for job, decision in found.items() if decision is not None}
    return dict(sorted(held.items(), key=lambda entry: entry[1].decided_at))


def require_approval(local: Path, site: str, job: str) -> None:
    """Refuse a job that nobody at the site has approved.

    Raises:
        SiteError: code `approval_pending` or `approval_rejected`, and a line for the lead without detail.
    """
    held = read_decision(local, job)
    if held is None:
        raise SiteError("approval_pending", f"site {site} has not approved this job yet")
    if held.decision == "rejected":
        raise SiteError("approval_rejected", f"site {site} has rejected this job")


def require_approval_of_running_job(fl_ctx: FLContext) -> None:
    """Look again in the process of a job: where the site's kit lists no ApprovedJobDeployer, nobody has looked before.

    Raises:
        SiteError, ExperimentError: see `require_approval` and `app_digests`.
    """
    workspace, job_id = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT), fl_ctx.get_job_id()
    app = app_digests(Path(workspace.get_app_dir(job_id)), imported=True)
    job = job_hash(app, fl_ctx.get_prop(FLContextKey.JOB_META) or {})
    require_approval(Path(workspace.get_site_config_dir()), fl_ctx.get_identity_name(), job)


def settings_of_scope(local: Path, scope: str | None) -> SiteSettings:
    """What local/privacy.json says for a job of this privacy scope, or of none, which is the default one.

    Raises:
        SiteError: code `site_settings`; a site that cannot be understood runs no job, nor does one a job of a scope
            that is not in the file.
    """
    path = local / "privacy.json"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        name = scope or content.get("default_scope")
        found = [held for held in content.get("scopes") or [] if held["name"] == name]
        if len(found) > 1:
            raise ValueError(f"local/privacy.json: has two scopes of the name {name}")
        if scope and not found:  # FLARE's process may hold the file as it was when it began, and let the job in
            raise ValueError("local/privacy.json: has no scope of the name that the job asks for in its meta.json")
        return read_site_settings(found[0].get("properties") or {} if found else {})
    except FileNotFoundError:
        return SiteSettings()
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise SiteError("site_settings", f"local/privacy.json cannot be read ({type(error).__name__})") from None
    except json.JSONDecodeError as error:
        raise SiteError("site_settings", f"local/privacy.json: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise SiteError("site_settings", one_line(str(error))) from None


def _write(path: Path, content: Section) -> None:
    with replaced_file(path, "w", encoding="utf-8") as file:
        file.write(content.model_dump_json(indent=2) + "\n")
    path.chmod(0o644)
