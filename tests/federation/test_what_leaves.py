"""The site's filter in FLARE's own client: noise on one site's amplitude, and an answer that is refused."""

import numpy as np
import pytest
import torch

from harmofl.flare.state import Checkpoint
from tests.federation.conftest import RunJob

# The simulator reads no privacy.json: the executor puts into the context what FLARE would have read from it.
SCOPES = '''
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import FLContextKey
from nvflare.private.privacy_manager import Scope
from harmofl.flare.executor import HarmoFLExecutor
from harmofl.flare.filters import AmplitudeFilter


class HasAScope(HarmoFLExecutor):
    """BIDMC adds noise to its amplitude; HK has code that would send more than it may in round 1."""

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        site, scope = fl_ctx.get_identity_name(), Scope()
        noise = {"amplitude_noise": {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5}} if site == "BIDMC" else {}
        scope.set_props({"minimum_cases": 1, "workers": 0, **noise})
        scope.add_task_result_filter(AmplitudeFilter(), "out")
        fl_ctx.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
        fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, scope.props, private=True, sticky=False)
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if site == "HK" and task_name == "train" and shareable.get_header("current_round") == 1:
            dxo = from_shareable(result)
            dxo.meta["harmofl.numbers"] = {**dxo.meta["harmofl.numbers"], "Jane_Doe": 1}
            dxo.update_shareable(result)
        return result
'''


@pytest.mark.slow
def test_a_noised_amplitude_and_a_refused_answer(run_job: RunJob) -> None:
    overrides = {"federation.minimum_sites": 1, "federation.straggler_wait": 120, "amplitude.minimum_cases": 1}
    run = run_job(overrides=overrides, executor="drill.HasAScope", code=SCOPES)
    assert run.code == 0, run.output
    results = run.results
    # at site BIDMC noise stands on the amplitude: 8 cases, of which 64 % of a block of 25 train
    said = results.sites["BIDMC"].amplitude_noise
    assert said is not None and (said.mechanism, said.epsilon) == ("analytic_gaussian", 1.0)
    assert said.patients == results.sites["BIDMC"].cases_used["training"] == results.sites["BIDMC"].amplitude_patients
    assert results.sites["HK"].amplitude_sent and results.sites["HK"].amplitude_noise is None
    assert "the amplitude of 1 of the 2 sites that sent one is (epsilon, delta)" in results.privacy
    [kept] = run.workspace.rglob("BIDMC/**/amplitude_sent.pt")
    own = torch.load(kept.with_name("amplitude.pt"), weights_only=True)["own"].numpy()
    sent = torch.load(kept, weights_only=True)["values"].numpy()
    assert said.clip == pytest.approx(0.8 * own.size**0.5), "of the scale of site_gain, the root of channels x bins"
    assert np.abs(sent - own).std() > said.sigma / 4
    # the mean that every site got holds the noised array: BIDMC's half and HK's
    frozen = Checkpoint.load(run.server / "FL_global_model.pt").amplitude
    [other] = run.workspace.rglob("HK/**/amplitude.pt")
    expected = (sent + torch.load(other, weights_only=True)["own"].numpy()) / 2
    assert frozen is not None
    np.testing.assert_allclose(frozen.numpy(), expected, rtol=1e-5)
    # at site HK the filter refused the whole of an answer
    assert run.rounds[1].sites_refused["HK"] == (
        "TASK_RESULT_FILTER_ERROR: a privacy filter of the site let nothing out; see the site's log"
    )
    assert "Jane_Doe" not in (run.workspace / "server" / "log.txt").read_text()
    assert all(result.bytes_sent["numbers"] > 0 for result in results.sites.values())
