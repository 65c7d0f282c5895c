"""Progress lines for whoever watches a run, and a console that shows them instead of the framework's own.

Two loggers of the package have a name of their own. `harmofl.progress` is for whoever watches. `harmofl.findings` takes
everything that may name files or patients, and nothing else does: a site's logging configuration can keep it in one
file that no one streams, copies or reads but the site.
"""

import logging
from collections.abc import Iterable, MutableMapping
from typing import Any

from nvflare.fuel.utils.log_utils import ConciseLogFilter

from harmofl.data.findings import Finding

PROGRESS = logging.getLogger("harmofl.progress")
FINDINGS = logging.getLogger("harmofl.findings")


class _ProgressFilter(logging.Filter):
    """Lets progress lines pass, and whatever is a warning or worse."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on one record."""
        # FLARE renames a record to the last part of its logger's name and keeps the whole in fullName
        name = getattr(record, "fullName", record.name)
        return record.levelno >= logging.WARNING or name == PROGRESS.name


def show_progress_on_console() -> None:
    """Where the console is in FLARE's default mode `concise`, show progress lines only; other modes are left alone.

    The log files keep every line.
    """
    for handler in logging.getLogger().handlers:
        concise = [held for held in handler.filters if isinstance(held, ConciseLogFilter)]
        if type(handler) is logging.StreamHandler and concise:
            for held in concise:
                handler.removeFilter(held)
            handler.addFilter(_ProgressFilter())


class SiteLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with a site's name: in a simulation all sites share one console."""

    def __init__(self, logger: logging.Logger, site: str) -> None:
        """Log to `logger` on behalf of a site."""
        super().__init__(logger)
        self._site = site

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the name in front."""
        return f"{self._site}: {msg}", kwargs


def log_findings(site: str, findings: Iterable[Finding]) -> None:
    """Log what was found in a site's data; files with the same notice share a line."""
    logger = SiteLogger(FINDINGS, site)
    notices: dict[str, list[str]] = {}
    for finding in findings:
        if finding.severity == "notice":
            notices.setdefault(finding.message, []).append(finding.subject)
        else:
            logger.warning(str(finding))
    for message, subjects in notices.items():
        more = f" and {len(subjects) - 1} more" if len(subjects) > 1 else ""
        logger.info(f"notice: {subjects[0]}{more}: {message}")
