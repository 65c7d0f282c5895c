"""AmplitudeFilter: what a site lets out, decided by the site and not by a job."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare.apis.dxo import DXO, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from harmofl.evidence.results import NoiseStatement
from harmofl.flare.allowed_names import allowed_names, refuse_other_names
from harmofl.flare.progress import FINDINGS
from harmofl.flare.site import SiteError, is_simulated, site_config, site_settings
from harmofl.flare.site_settings import NoiseSettings
from harmofl.flare.wire import AmplitudeStatistic, MessageError, UpdateMessage, pack_error, pack_update, unpack_update
from harmofl.sections import one_line

if TYPE_CHECKING:
    from harmofl.flare.releases import Offer
    from harmofl.flare.state import SiteState

_RUN_ID, _OFFER = "harmofl.run_id", "harmofl.offer"
_SENT = "amplitude_sent"


class RefusedAnswerError(RuntimeError):
    """An answer that must not leave the site; the message names nothing of what it holds."""


class AmplitudeFilter(Filter):
    """Stands among the task_result_filters of the scope in a site's local/privacy.json.

    It lets out what the contract between server and sites knows, scores and reasons under names that are known
    beforehand, and refuses any other answer as a whole; this also means that jobs of other software need a scope of
    their own. It drops an amplitude of fewer patients than the scope's `minimum_cases` (5); weights and numbers leave
    without it. Where the scope asks for `amplitude_noise`, it drops an amplitude whose patients were not clipped as
    asked, and adds the noise. A run gets one noised amplitude, and every other run of the same patients and settings
    gets the same one: what was sent stands in the site's ledger of releases, and is sent again.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Check one answer.

        Raises:
            RefusedAnswerError: it holds more than the contract knows, or the site's settings cannot be used. FLARE
                sends TASK_RESULT_FILTER_ERROR in its place.
        """
        if shareable.get_return_code() != ReturnCode.OK:
            return self._only_an_error(shareable)
        scope: Mapping[str, Any] = fl_ctx.get_prop(FLContextKey.SCOPE_PROPERTIES) or {}
        update = self._within_the_contract(shareable, scope, fl_ctx)
        if update.amplitude is None:
            return pack_update(update)
        try:
            settings = site_settings(scope)
            needed, noise = settings.minimum_cases, settings.amplitude_noise
            problem = _problem(update.amplitude, needed, noise)
            if problem:
                self.log_warning(fl_ctx, f"amplitude not sent: {problem}", fire_event=False)
                return pack_update(replace(update, amplitude=None))
            if noise:
                update = self._noised(update, noise, fl_ctx)
        except (RuntimeError, OSError, ValueError) as error:
            FINDINGS.warning(f"{fl_ctx.get_identity_name()}: {error}")
            raise RefusedAnswerError(
                f"the amplitude cannot be checked or its noise not be kept ({type(error).__name__})"
            ) from None
        return pack_update(update)

    def _only_an_error(self, shareable: Shareable) -> Shareable:
        """The code and the line of a failed task, and nothing else that may be in its answer."""
        try:
            return pack_error(shareable)
        except MessageError as error:
            raise RefusedAnswerError(str(error)) from None

    def _within_the_contract(self, shareable: Shareable, scope: Mapping[str, Any], fl_ctx: FLContext) -> UpdateMessage:
        site = fl_ctx.get_identity_name()
        try:
            update = unpack_update(shareable)
            refuse_other_names(update.numbers, allowed_names(scope))
            if _form(shareable) == _form(pack_update(update)) and _all_numeric(update):
                return update
            FINDINGS.warning(
                f"{site}: an answer holds more than the contract knows: {one_line(str(_form(shareable)), 2000)}"
            )
        except (MessageError, SiteError) as error:
            FINDINGS.warning(f"{site}: an answer is not of the contract: {error}")
        raise RefusedAnswerError(
            "the answer is not sent: it holds more than weight differences, an amplitude and the numbers that "
            "harmofl.flare.wire.SiteNumbers lists; harmofl.findings says what"
        )

    def _noised(self, update: UpdateMessage, noise: NoiseSettings, fl_ctx: FLContext) -> UpdateMessage:
        """The answer with noise on its amplitude, or with what left before in its place."""
        from harmofl.flare.local_amplitude import RELEASES, release_line
        from harmofl.flare.releases import release
        from harmofl.flare.state import SiteState

        statistic = update.amplitude
        assert statistic is not None, "checked before"
        state = SiteState(_state_folder(fl_ctx), _run_id(fl_ctx))
        if is_simulated(fl_ctx):
            return replace(update, amplitude=_kept_for_the_run(state, lambda: _with_noise(statistic, noise)))
        offer = fl_ctx.get_prop(_OFFER)
        if offer is None or offer.run != state.run_id:
            self.log_warning(
                fl_ctx, "amplitude not sent: whose it is was not told to the ledger of releases", fire_event=False
            )
            return replace(update, amplitude=None)
        answer = release(site_config(fl_ctx).state_root, offer, lambda: _with_noise(statistic, noise))
        state.save_once(RELEASES, answer.counts)
        if line := release_line(answer.outcome, answer.statistic, offer.limit):
            (self.log_warning if answer.outcome == "withheld" else self.log_info)(fl_ctx, line, fire_event=False)
        return replace(update, amplitude=answer.statistic)


def _with_noise(statistic: AmplitudeStatistic, noise: NoiseSettings) -> AmplitudeStatistic:
    # torch and scipy are needed here only
    from harmofl.core.gaussian_mechanism import calibrate_sigma, gaussian_noise

    assert statistic.patients is not None and statistic.clip is not None, "checked when it was read"
    sigma = calibrate_sigma(noise.epsilon, noise.delta, 2 * statistic.clip / statistic.patients)
    said = NoiseStatement(
        mechanism="analytic_gaussian",
        epsilon=noise.epsilon,
        delta=noise.delta,
        clip=statistic.clip,
        patients=statistic.patients,
        sigma=sigma,
    )
    values = statistic.values + gaussian_noise(statistic.values.shape, sigma)
    if values.ndim > 2:  # an amplitude (C, rows, columns) is 0 or more, a log profile (C, bins) is not
        values = values.clip(min=0)
    return AmplitudeStatistic(values.astype(np.float32), statistic.images, said.patients, noise=said)


def _kept_for_the_run(state: "SiteState", draw: Callable[[], AmplitudeStatistic]) -> AmplitudeStatistic:
    """In simulation, where there is no ledger: what this run got, drawn once."""
    import torch

    held = state.load_once(_SENT)
    if held is None:
        drawn = draw()
        assert drawn.noise is not None, "just drawn"
        values = torch.as_tensor(drawn.values)
        held = {"values": values, "images": drawn.images, "noise": drawn.noise.model_dump()}
        state.save_once(_SENT, held)
    said = NoiseStatement.model_validate(held["noise"])
    return AmplitudeStatistic(held["values"].numpy(), held["images"], said.patients, noise=said)


def note_run(fl_ctx: FLContext, run_id: str) -> None:
    """Tell the filter which run a task belongs to; FLARE takes the task's data away before filters run."""
    fl_ctx.set_prop(_RUN_ID, run_id, private=True, sticky=False)


def note_offer(fl_ctx: FLContext, offer: "Offer | None") -> None:
    """Tell the filter whose images an amplitude is of; no answer says that."""
    fl_ctx.set_prop(_OFFER, offer, private=True, sticky=False)


def require_filter(fl_ctx: FLContext, *, noise: bool) -> None:
    """Make sure that the noise which a site asks for will be added, and that a job chooses no scope without the filter.

    A site may have scopes for other software, which say nothing of its limits for this package.

    Raises:
        SiteError: the scope lists no AmplitudeFilter: code `noise_settings` where it asks for noise, code `scope` where
            the job chose the scope.
    """
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    listed = scope.task_result_filters.get(FilterKey.OUT, []) if scope is not None else []
    if any(isinstance(held, AmplitudeFilter) for held in listed):
        return
    if noise:
        raise SiteError(
            "noise_settings",
            "local/privacy.json: amplitude_noise is set, but the scope's task_result_filters do not list "
            "harmofl.flare.filters.AmplitudeFilter, which adds it",
        )
    if fl_ctx.get_prop(FLContextKey.JOB_SCOPE_NAME) and not is_simulated(fl_ctx):
        raise SiteError(
            "scope",
            f"site {fl_ctx.get_identity_name()}: the privacy scope that the job asks for lists no "
            "harmofl.flare.filters.AmplitudeFilter here, so it is not for this package; leave scope out of meta.json",
        )


def _problem(statistic: AmplitudeStatistic, needed: int, noise: NoiseSettings | None) -> str | None:
    """Why an amplitude must stay at the site."""
    if statistic.patients is None or statistic.patients < needed:
        return f"it is of {statistic.patients} training patients, {needed} needed at this site"
    if statistic.noise is not None:
        return "it claims noise that this site did not add"
    if noise is None:
        return None if statistic.clip is None else "it waits for noise that this site does not add"
    if statistic.clip is None or statistic.relative_clip != noise.relative_clip:
        return (
            f"its patients were not clipped at {noise.relative_clip:g} of the scale, as amplitude_noise in "
            "local/privacy.json asks"
        )
    return None


def _form(value: Any) -> Any:
    """Names and kinds of all parts of an answer, without values; FLARE's note of which filters ran may come along."""
    if isinstance(value, Shareable):
        dxo = from_shareable(value)
        headers = {name: set(held) if isinstance(held, Mapping) else None for name, held in value.items()}
        return headers | {"DXO": _form(dxo)}
    if isinstance(value, DXO):
        return str(value.data_kind), _form(value.data), set(value.meta or {}) - {MetaKey.FILTER_HISTORY}
    return {name: _form(part) for name, part in value.items()} if isinstance(value, Mapping) else None


def _all_numeric(update: UpdateMessage) -> bool:
    return all(
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fiub"
        for value in (update.difference or {}).values()
    )


def _run_id(fl_ctx: FLContext) -> str:
    run_id = fl_ctx.get_prop(_RUN_ID)
    if not isinstance(run_id, str) or not re.fullmatch(r"\w+", run_id):
        raise SiteError("no_run", "the answer belongs to no run, so its amplitude could be sent twice")
    return run_id


def _state_folder(fl_ctx: FLContext) -> Path:
    return site_config(fl_ctx).state_root / "state"
