"""AmplitudeFilter: what a site lets out, whatever the job's code put into an answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.private.privacy_manager import Scope

from harmofl.core.gaussian_mechanism import gaussian_delta
from harmofl.flare.filters import AmplitudeFilter, RefusedAnswerError, note_offer, note_run, require_filter
from harmofl.flare.releases import Offer
from harmofl.flare.site import SiteError
from harmofl.flare.wire import AmplitudeStatistic, UpdateMessage, error_reply, pack_update, read_error, unpack_update

NOISE = {"relative_clip": 0.5, "epsilon": 1.0, "delta": 1e-5}
SHAPE = (3, 20, 20)
SCALE = 6.0  # as if the job's region had it
DIFFERENCE = {"w": np.ones(3, np.float32), "count": np.array(2, np.int64)}
NUMBERS = {"steps": 3, "loss": 0.5, "cases": {"training": 6}}


class Workspace:
    """As much of FLARE's workspace as a site's settings need."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get_root_dir(self) -> str:
        return str(self.root)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hospital's context in a task of a run, with the filter in its privacy scope."""
    for variable in ("HARMOFL_DATA_ROOT", "HARMOFL_STATE_ROOT"):
        monkeypatch.delenv(variable, raising=False)

    def make(
        run_id: str | None = "run1", listed: bool = True, patients: str | None = None, **properties: Any
    ) -> FLContext:
        """Runs are of patients of their own unless they are said to share them."""
        fl_ctx = FLContextManager(None, "HK", "job", {}, {}).new_context()
        scope = Scope()
        scope.set_props({"data_root": "/data"} | properties)
        if listed:
            scope.add_task_result_filter(AmplitudeFilter(), FilterKey.OUT)
        fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(tmp_path), private=True)
        fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True)
        fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, scope.props, private=True)
        if run_id is not None:
            note_run(fl_ctx, run_id)
            members = tuple((f"{patients or run_id}{case}", f"{patients or run_id}{case}", "0:1") for case in range(6))
            statistic = {"region": "low", "noise": properties.get("amplitude_noise")}
            note_offer(fl_ctx, Offer("prostate", run_id, statistic, members, weighted=False, limit=5))
        return fl_ctx

    return make


def filtered(shareable: Shareable, fl_ctx: FLContext) -> Shareable:
    """As FLARE runs it: from the scope, on the way out."""
    answer: Shareable = apply_filters(Scope.TASK_RESULT_FILTERS_NAME, shareable, fl_ctx, {}, "train", FilterKey.OUT)
    return answer


def answer(patients: int = 6, difference: Any = DIFFERENCE, clip: float | None = None, value: float = 2.0) -> Shareable:
    values = np.full(SHAPE, value, np.float32 if clip is None else np.float64)
    weights = None if difference is None else dict(difference)
    relative = None if clip is None else clip / SCALE
    return pack_update(UpdateMessage(weights, AmplitudeStatistic(values, 12, patients, clip, relative), dict(NUMBERS)))


def sent_amplitude(shareable: Shareable, fl_ctx: FLContext) -> AmplitudeStatistic:
    amplitude = unpack_update(filtered(shareable, fl_ctx)).amplitude
    assert amplitude is not None
    return amplitude


def test_what_the_contract_knows_leaves_unchanged(context: Any, wire: Any) -> None:
    for message in (answer(), answer(difference=None), pack_update(UpdateMessage(DIFFERENCE, None, NUMBERS))):
        received = unpack_update(wire(filtered(message, context())))
        expected = unpack_update(wire(message))
        assert received.numbers == expected.numbers == NUMBERS
        assert (received.difference is None) == (expected.difference is None)
        assert received.difference is None or received.difference["w"].tolist() == [1, 1, 1]
        assert (received.amplitude is None) == (expected.amplitude is None)
        assert received.amplitude is None or (received.amplitude.values == 2).all()
    evaluation = pack_update(UpdateMessage(numbers={"test": {"final": {"dice": [0.5, float("nan")]}}}))
    assert unpack_update(filtered(evaluation, context())).numbers["test"]["final"]["dice"][0] == 0.5


@pytest.mark.parametrize(("patients", "limit"), [(4, {}), (6, {"minimum_cases": 7})])
@pytest.mark.parametrize("difference", [None, DIFFERENCE])
def test_the_amplitude_of_few_patients_stays_and_the_rest_leaves(
    context: Any, caplog: pytest.LogCaptureFixture, patients: int, limit: dict[str, int], difference: Any
) -> None:
    result = filtered(answer(patients, difference), context(**limit))
    # as a site without an amplitude answers: plain differences, or numbers alone in the amplitude task
    kind = DataKind.METRICS if difference is None else DataKind.WEIGHT_DIFF
    assert from_shareable(result).data_kind == kind and "amplitude" not in str(from_shareable(result).data)
    assert unpack_update(result).numbers == NUMBERS
    [line] = [record.getMessage() for record in caplog.records]
    assert f"amplitude not sent: it is of {patients} training patients, " in line
    assert sent_amplitude(answer(patients + 1, difference), context(**limit)).patients == patients + 1


def spoiled(change: Any) -> Shareable:
    """An answer of code that does not keep to the contract."""
    packed = answer()
    dxo = from_shareable(packed)
    change(packed, dxo)
    return dxo.update_shareable(packed)


def rename_number(packed: Shareable, dxo: DXO) -> None:
    dxo.meta["harmofl.numbers"] = {"Jane_Doe": 1}


def add_score(packed: Shareable, dxo: DXO) -> None:
    dxo.meta["harmofl.numbers"] = NUMBERS | {"test": {"final": {"Jane Doe.nii": [0.5]}}}


def add_metadata(packed: Shareable, dxo: DXO) -> None:
    dxo.meta["patients"] = ["Jane_Doe"]


def add_inner_metadata(packed: Shareable, dxo: DXO) -> None:
    dxo.data["weights"].meta["patients"] = ["Jane_Doe"]


def add_part(packed: Shareable, dxo: DXO) -> None:
    dxo.data["images"] = DXO(DataKind.WEIGHTS, data={"Jane_Doe": np.ones(2)})


def add_to_the_amplitude(packed: Shareable, dxo: DXO) -> None:
    dxo.data["amplitude"].data["of_each"] = {"Jane_Doe": np.ones(2)}


def send_weights(packed: Shareable, dxo: DXO) -> None:
    dxo.data["weights"].data_kind = DataKind.WEIGHTS


def send_text(packed: Shareable, dxo: DXO) -> None:
    dxo.data["weights"].data["w"] = "Jane_Doe"


def send_objects(packed: Shareable, dxo: DXO) -> None:
    dxo.data["weights"].data["w"] = np.array(["Jane_Doe"], object)


def add_header(packed: Shareable, dxo: DXO) -> None:
    packed.set_header("patients", ["Jane_Doe"])


def add_body(packed: Shareable, dxo: DXO) -> None:
    packed["patients"] = ["Jane_Doe"]


def hide_the_patients(packed: Shareable, dxo: DXO) -> None:
    del dxo.data["amplitude"].data["patients"]


@pytest.mark.parametrize(
    "change",
    [
        rename_number, add_score, add_metadata, add_inner_metadata, add_part, add_to_the_amplitude, send_weights,
        send_text, send_objects, add_header, add_body, hide_the_patients,
    ],
)  # fmt: skip
def test_an_answer_that_holds_more_than_the_contract_is_refused(
    context: Any, caplog: pytest.LogCaptureFixture, change: Any
) -> None:
    with pytest.raises(RefusedAnswerError) as caught:
        filtered(spoiled(change), context())
    assert "\n" not in str(caught.value) and "Jane" not in str(caught.value)
    # FLARE logs the error, which may be streamed; only harmofl.findings says more
    assert {record.name for record in caplog.records} == {"harmofl.findings"}


@pytest.mark.parametrize("kind", [DataKind.METRICS, DataKind.ANALYTIC, DataKind.STATISTICS, DataKind.WEIGHTS])
def test_an_answer_of_other_software_is_refused(context: Any, kind: str) -> None:
    with pytest.raises(RefusedAnswerError):
        filtered(DXO(kind, data={"mean": 1.0}).to_shareable(), context())
    with pytest.raises(RefusedAnswerError):
        filtered(Shareable({"mean": 1.0}), context())


def test_the_server_can_read_that_a_filter_refused() -> None:
    code, reason = read_error(make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR))
    assert (code, reason) == (
        "TASK_RESULT_FILTER_ERROR",
        "a privacy filter of the site let nothing out; see the site's log",
    )


def test_a_failed_task_says_its_code_and_its_line_and_nothing_else(context: Any) -> None:
    reply = error_reply("no_data", "site HK has no case to train on")
    reply["trace"] = "/data/Jane_Doe.nii.gz"
    reply.set_header("trace", "/data/Jane_Doe.nii.gz")
    result = filtered(reply, context())
    assert read_error(result) == ("no_data", "site HK has no case to train on")
    assert result.get_return_code() == ReturnCode.EXECUTION_EXCEPTION and "Jane" not in str(dict(result))
    aborted = filtered(make_reply(ReturnCode.TASK_ABORTED), context())
    assert aborted.get_return_code() == ReturnCode.TASK_ABORTED
    for code, line in (("no data", "fine"), ("fine", "two\nlines"), ("fine", "x" * 3000)):
        with pytest.raises(RefusedAnswerError):
            filtered(error_reply(code, line), context())


def test_noise_is_calibrated_to_what_one_patient_can_change_and_is_stated(context: Any, wire: Any) -> None:
    fl_ctx = context(amplitude_noise=NOISE)
    result = unpack_update(wire(filtered(answer(clip=3.0, value=100.0), fl_ctx))).amplitude
    assert result is not None and result.noise is not None and result.clip is None
    said = result.noise
    assert (said.mechanism, said.epsilon, said.delta, said.clip) == ("analytic_gaussian", 1.0, 1e-5, 3.0)
    assert said.patients == result.patients == 6 and result.images == 12
    # sensitivity 2 * 3 / 6 = 1
    assert gaussian_delta(1.0, said.sigma, 1.0) == pytest.approx(1e-5, rel=1e-6)
    assert (result.values.dtype, result.values.shape) == (np.float32, SHAPE)
    # 1200 values: the deviation itself deviates by sigma / sqrt(2400), 2 %
    assert result.values.std() == pytest.approx(said.sigma, rel=0.15)
    assert result.values.mean() == pytest.approx(100.0, abs=6 * said.sigma / 1200**0.5)


def test_over_many_runs_the_noise_of_one_value_has_its_deviation(context: Any) -> None:
    sent = [
        sent_amplitude(answer(clip=3.0, value=100.0), context(f"run{run}", amplitude_noise=NOISE)) for run in range(8)
    ]
    values = np.stack([amplitude.values for amplitude in sent])
    assert sent[0].noise is not None
    # 9600 draws: 0.7 % is one sigma
    assert values.std() == pytest.approx(sent[0].noise.sigma, rel=0.05)
    correlation = np.corrcoef(values.reshape(8, -1))
    assert np.abs(correlation - np.eye(8)).max() < 0.2, "every run has noise of its own"


def test_an_amplitude_is_0_or_more_and_a_log_profile_is_not(context: Any) -> None:
    amplitude = sent_amplitude(answer(clip=3.0, value=0.0), context(amplitude_noise=NOISE))
    assert amplitude.values.min() == 0 and 0.4 < (amplitude.values > 0).mean() < 0.6
    profile = AmplitudeStatistic(np.zeros((3, 200)), 12, 6, clip=3.0, relative_clip=0.5)
    message = pack_update(UpdateMessage(None, profile, NUMBERS))
    assert sent_amplitude(message, context("run2", amplitude_noise=NOISE)).values.min() < 0


def test_a_run_that_asks_again_gets_the_same_array(context: Any) -> None:
    first = sent_amplitude(answer(clip=3.0), context(amplitude_noise=NOISE))
    # another estimate, other settings since: still what was sent, and what was said about it
    again = sent_amplitude(
        answer(clip=9.0, value=50.0), context(amplitude_noise=NOISE | {"relative_clip": 1.5, "epsilon": 2.0})
    )
    assert np.array_equal(first.values, again.values) and first.noise == again.noise
    other = sent_amplitude(answer(clip=3.0), context("run2", amplitude_noise=NOISE))
    assert not np.array_equal(first.values, other.values)


def test_another_run_of_the_same_patients_gets_the_same_array_and_costs_no_epsilon(context: Any) -> None:
    first = sent_amplitude(answer(clip=3.0), context("run1", patients="p", amplitude_noise=NOISE))
    again = sent_amplitude(answer(clip=3.0, value=9.0), context("run2", patients="p", amplitude_noise=NOISE))
    assert np.array_equal(first.values, again.values) and first.noise == again.noise
    stricter = NOISE | {"epsilon": 0.5}
    drawn = sent_amplitude(answer(clip=3.0), context("run3", patients="p", amplitude_noise=stricter))
    assert not np.array_equal(first.values, drawn.values), "other noise is another release"


def test_without_whose_it_is_no_noised_amplitude_leaves(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    fl_ctx = context(amplitude_noise=NOISE)
    note_offer(fl_ctx, None)
    result = unpack_update(filtered(answer(clip=3.0), fl_ctx))
    assert result.amplitude is None and result.difference is not None
    assert "whose it is was not told" in caplog.text


def test_an_array_sent_that_cannot_be_read_is_not_drawn_anew(context: Any, tmp_path: Path) -> None:
    sent_amplitude(answer(clip=3.0), context(amplitude_noise=NOISE))
    [path] = tmp_path.rglob("ledger.json")
    path.write_bytes(b"damaged")
    with pytest.raises(RefusedAnswerError, match="SiteError"):
        filtered(answer(clip=3.0), context(amplitude_noise=NOISE))


@pytest.mark.parametrize("run_id", [None, "../elsewhere"])
def test_without_a_run_no_noised_amplitude_leaves(context: Any, run_id: str | None) -> None:
    with pytest.raises(RefusedAnswerError):
        filtered(answer(clip=3.0), context(run_id, amplitude_noise=NOISE))


@pytest.mark.parametrize("clip", [None, 2.0, 4.0])
def test_an_amplitude_that_was_not_clipped_as_asked_stays(
    context: Any, caplog: pytest.LogCaptureFixture, clip: float | None
) -> None:
    result = unpack_update(filtered(answer(clip=clip), context(amplitude_noise=NOISE)))
    assert result.amplitude is None and result.difference is not None
    assert "not clipped at 0.5 of the scale, as amplitude_noise" in caplog.text


def test_noise_that_the_site_did_not_add_is_not_believed(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    noised = sent_amplitude(answer(clip=3.0), context(amplitude_noise=NOISE))
    claimed = pack_update(UpdateMessage(DIFFERENCE, noised, NUMBERS))
    for scope in ({}, {"amplitude_noise": NOISE}):
        assert unpack_update(filtered(claimed, context("run2", **scope))).amplitude is None
    assert "claims noise that this site did not add" in caplog.text
    assert unpack_update(filtered(answer(clip=3.0), context("run2"))).amplitude is None


@pytest.mark.parametrize("scope", [{"minimum_cases": "few"}, {"amplitude_noise": {"clip": 1}}])
def test_settings_that_cannot_be_used_let_no_amplitude_out(context: Any, scope: dict[str, Any]) -> None:
    with pytest.raises(RefusedAnswerError, match="SiteError"):
        filtered(answer(), context(**scope))


def test_a_site_that_asks_for_noise_must_list_the_filter(context: Any) -> None:
    require_filter(context(), noise=True)
    for fl_ctx in (context(listed=False), FLContextManager(None, "HK", "job", {}, {}).new_context()):
        with pytest.raises(SiteError, match="do not list harmofl.flare.filters.AmplitudeFilter") as caught:
            require_filter(fl_ctx, noise=True)
        assert caught.value.code == "noise_settings"


def test_a_job_chooses_no_scope_without_the_filter(context: Any) -> None:
    """A site may have a scope for other software, which asks for no noise and knows no limit."""
    listed, other = context(), context(listed=False)
    for fl_ctx in (listed, other):
        fl_ctx.set_prop(FLContextKey.JOB_SCOPE_NAME, "research", private=True)
    require_filter(listed, noise=False)
    with pytest.raises(
        SiteError, match="the privacy scope that the job asks for lists no .* leave scope out"
    ) as caught:
        require_filter(other, noise=False)
    assert caught.value.code == "scope"
    other.set_prop(FLContextKey.JOB_SCOPE_NAME, "", private=True)
    require_filter(other, noise=False)  # the site's own default is its own choice; preflight warns of it
