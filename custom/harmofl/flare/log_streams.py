"""A job's component that would send a site's logs to the server while it runs."""

from nvflare.apis.fl_context import FLContext

from harmofl.flare.site import SiteError, is_simulated


def refuse_log_stream(fl_ctx: FLContext) -> None:
    """Refuse a job that streams this site's logs, before anything is read that a log could name.

    FLARE's JobLogStreamer may stand in a job without code, sends any file beside the job's log, findings.txt too, and
    is stopped by `allow_log_streaming` false alone, which FLARE's own kits set to true.

    Raises:
        SiteError: code `log_stream`, outside simulation where the site's resources.json allows it.
    """
    engine = fl_ctx.get_engine()
    if engine is None or is_simulated(fl_ctx):
        return
    from nvflare.app_common.logging.constants import is_log_streaming_allowed
    from nvflare.app_common.logging.job_log_streamer import JobLogStreamer

    streams = [held for held in engine.get_all_components().values() if isinstance(held, JobLogStreamer)]
    if streams and is_log_streaming_allowed(fl_ctx):
        raise SiteError(
            "log_stream",
            f"site {fl_ctx.get_identity_name()}: the job streams logs of this site (JobLogStreamer), which may name "
            "patients; take it out, or the hospital sets allow_log_streaming to false in local/resources.json",
        )
