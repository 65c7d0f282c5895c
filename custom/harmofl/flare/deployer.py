"""ApprovedJobDeployer: takes a job in at a site only where somebody there has approved it."""

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.apis.app_deployer_spec import AppDeployerSpec
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.utils.zip_utils import unzip_all_from_bytes
from nvflare.private.fed.utils.app_deployer import AppDeployer

from harmofl.experiment import ExperimentError
from harmofl.flare.approval import (
    Arrival,
    app_digests,
    job_hash,
    note_arrival,
    require_approval,
    settings_of_scope,
)
from harmofl.flare.site import SiteError, state_root
from harmofl.sections import one_line

MOST_TEXT = 200  # letters of what the server says about a job


class ApprovedJobDeployer(AppDeployerSpec):
    """Stands as component `app_deployer` in a site's local/resources.json, which FLARE's parent process reads there.

    FLARE asks it before a process of the job exists and before any code of the job is imported; what it answers stands
    in the job's `job_deploy_detail` at the server, where the lead reads it. A site whose privacy scope does not say
    `"approval": "required"` takes jobs in as FLARE does.
    """

    def deploy(
        self, workspace: Workspace, job_id: str, job_meta: dict, *, app_name: str, app_data: bytes, fl_ctx: FLContext
    ) -> str:
        """Let FLARE take the job in, or answer why the site does not, as a code and one line without detail."""
        try:
            self._require_approval(workspace, job_meta, app_data)
        except SiteError as error:
            return f"{error.code}: {error}"
        except ExperimentError as error:
            return f"approval_refused: site {workspace.site_name}: {error}"
        except Exception as error:  # whatever it is, the job stays out
            return f"approval_refused: site {workspace.site_name} cannot look at the job ({type(error).__name__})"
        return AppDeployer().deploy(workspace, job_id, job_meta, app_name, app_data, fl_ctx) or ""

    @staticmethod
    def _require_approval(workspace: Workspace, meta: dict[str, Any], app_data: bytes) -> None:
        local, site = Path(workspace.get_site_config_dir()), workspace.site_name
        scope = meta.get("scope")
        if settings_of_scope(local, scope).approval != "required":
            return
        with tempfile.TemporaryDirectory(prefix="harmofl-") as place:
            unzip_all_from_bytes(app_data, place)
            job = job_hash(app_digests(Path(place)), meta)
        try:
            require_approval(local, site, job)
        except SiteError:
            told = [meta.get(key) for key in ("name", "job_id", "submitter_name")]
            name, job_id, submitter = (one_line(str(text))[:MOST_TEXT] for text in told)
            arrived_at = datetime.now(UTC).isoformat(timespec="seconds")
            arrival = Arrival(job=name, job_id=job_id, submitter=submitter, arrived_at=arrived_at)
            note_arrival(state_root(site, Path(workspace.get_root_dir())), job, arrival)
            raise
