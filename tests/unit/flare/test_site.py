"""Where a site's data comes from, and what a hospital has set against what a job asks for."""

from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager

from harmofl.flare import site as module
from harmofl.flare.site import SiteError, simulated_data_root, site_config


class Workspace:
    """As much of FLARE's workspace as a site's settings need."""

    def get_root_dir(self) -> str:
        return "/kit"


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A site's context; `settings` is what experiment.json says."""
    for variable in ("HARMOFL_DATA_ROOT", "HARMOFL_STATE_ROOT", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)

    def make(
        *, simulated: bool, scope: dict[str, Any] | None = None, settings: dict[str, Any] | None = None
    ) -> FLContext:
        fl_ctx = FLContextManager(None, "HK", "job", {}, {}).new_context()
        fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "HK")
        fl_ctx.set_prop(FLContextKey.SIMULATE_MODE, simulated)
        fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace())
        fl_ctx.set_prop(FLContextKey.SCOPE_PROPERTIES, scope or {})
        monkeypatch.setattr(module, "read_job_settings", lambda _: settings or {})
        return fl_ctx

    return make


def test_the_environment_comes_before_the_scope_and_the_scope_before_the_job(context: Any, monkeypatch: Any) -> None:
    job = {"data": {"simulated_root": "/job/{SITE_NAME}"}}
    assert site_config(context(simulated=True, settings=job)).data_root == Path("/job/HK")
    scoped = context(simulated=True, settings=job, scope={"data_root": "/scope"})
    assert site_config(scoped).data_root == Path("/scope")
    monkeypatch.setenv("HARMOFL_DATA_ROOT", "/environment")
    assert site_config(scoped).data_root == Path("/environment")


def test_a_job_never_chooses_a_path_at_a_real_site(context: Any) -> None:
    with pytest.raises(SiteError, match="site HK has no data: set HARMOFL_DATA_ROOT") as caught:
        site_config(context(simulated=False, settings={"data": {"simulated_root": "/etc"}}))
    assert caught.value.code == "no_data_root"
    assert site_config(context(simulated=True)).demo, "in simulation the same site runs the demo"


def test_a_relative_data_root_is_refused_without_its_name(context: Any) -> None:
    with pytest.raises(SiteError) as caught:
        site_config(context(simulated=False, scope={"data_root": "patients/Jane"}))
    assert caught.value.code == "relative_data_root" and "Jane" not in str(caught.value)


def test_a_hospital_keeps_the_amplitude_of_fewer_than_five_unless_it_says_otherwise(context: Any) -> None:
    root = {"data_root": "/data"}
    assert site_config(context(simulated=False, scope=root)).minimum_cases == 5
    assert site_config(context(simulated=False, scope={**root, "minimum_cases": 20})).minimum_cases == 20
    assert site_config(context(simulated=True)).minimum_cases == 1, "one machine holds all data, nothing leaves"


@pytest.mark.parametrize("number", [0, -1, 2.5, "5", True, None])
def test_a_limit_that_is_no_number_of_patients_is_refused(context: Any, number: Any) -> None:
    with pytest.raises(SiteError, match="minimum_cases in local/privacy.json must be a whole number") as caught:
        site_config(context(simulated=False, scope={"data_root": "/data", "minimum_cases": number}))
    assert caught.value.code == "minimum_cases"


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("workers", "two", "a whole number of 0 or more"),
        ("workers", -1, "a whole number of 0 or more"),
        ("workers", None, "a whole number of 0 or more"),
        ("workers", True, "a whole number of 0 or more"),
        ("threads", 0, "a whole number above 0"),
        ("threads", 2.0, "a whole number above 0"),
        ("device", "gpu", "auto, cpu, cuda or, by number, cuda:1"),
        ("device", "cuda:", "auto, cpu"),
        ("device", 0, "auto, cpu"),
        ("device", "cpu\n", "auto, cpu"),
        ("device", "cuda:0,cuda:0", "auto, cpu, cuda or, by number, cuda:1, or several such as cuda:0,cuda:1"),
        ("device", "cuda:0,cuda:00", "auto, cpu"),
        ("device", "cpu,cuda:0", "auto, cpu"),
        ("device", "auto,auto", "auto, cpu"),
        ("device", "cuda,cuda:1", "auto, cpu"),
        ("device", "cuda:0,", "auto, cpu"),
        ("compile", "true", "true or false"),
        ("compile", 1, "true or false"),
        ("data_root", 5, "text"),
        ("data_root", ["/patients/Jane"], "text"),
    ],
)
def test_a_property_that_cannot_be_used_is_named_without_its_value(
    context: Any, key: str, value: Any, rule: str
) -> None:
    with pytest.raises(SiteError) as caught:
        site_config(context(simulated=False, scope={"data_root": "/data", key: value}))
    assert caught.value.code == key and str(caught.value).startswith(f"{key} in local/privacy.json must be {rule}")
    assert "\n" not in str(caught.value) and "/data" not in str(caught.value) and "Jane" not in str(caught.value)


def test_a_relative_state_root_is_refused_without_its_name(context: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "states/Jane")
    for simulated in (False, True):
        with pytest.raises(SiteError, match="site HK: HARMOFL_STATE_ROOT is a relative path") as caught:
            site_config(context(simulated=simulated, scope={"data_root": "/data"}))
        assert caught.value.code == "relative_state_root" and "Jane" not in str(caught.value)


def test_noise_on_the_amplitude_is_the_sites_own_choice(context: Any) -> None:
    scope = {"data_root": "/data", "amplitude_noise": {"relative_clip": 1, "epsilon": 1.0, "delta": 1e-5}}
    noise = site_config(context(simulated=False, scope=scope)).amplitude_noise
    assert noise is not None and (noise.relative_clip, noise.epsilon, noise.delta) == (1.0, 1.0, 1e-5)
    assert site_config(context(simulated=False, scope={"data_root": "/data"})).amplitude_noise is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_clip": 0}, "amplitude_noise.relative_clip: Input should be greater than 0, not 0"),
        ({"relative_clip": 5.0}, "amplitude_noise.relative_clip: Input should be less than or equal to 2, not 5.0"),
        ({"clip": 5.0}, "amplitude_noise.clip was a distance in units that the job chooses, and is gone; write rel"),
        ({"epsilon": -1.0}, "amplitude_noise.epsilon"),
        ({"epsilon": float("inf")}, "amplitude_noise.epsilon"),
        ({"delta": 1}, "amplitude_noise.delta: Input should be less than 1, not 1"),
        ({"delta": 0.0}, "amplitude_noise.delta"),
        ({"relative_clip": True}, "amplitude_noise.relative_clip"),
        ({"delta": None}, "amplitude_noise.delta"),
        ({"epsilom": 2.0}, "amplitude_noise.epsilom: unknown setting; did you mean 'epsilon'?"),
    ],
)
def test_noise_settings_that_cannot_be_used_are_named(context: Any, changes: dict[str, Any], words: str) -> None:
    noise = {"relative_clip": 0.8, "epsilon": 1.0, "delta": 1e-5} | changes
    with pytest.raises(SiteError) as caught:
        site_config(context(simulated=False, scope={"data_root": "/data", "amplitude_noise": noise}))
    assert caught.value.code == "noise_settings" and words in str(caught.value) and "\n" not in str(caught.value)


def test_noise_settings_of_another_form_are_refused(context: Any) -> None:
    for noise in (1.0, [], "strong", {"clip": 5.0}):
        with pytest.raises(SiteError, match="amplitude_noise"):
            site_config(context(simulated=False, scope={"data_root": "/data", "amplitude_noise": noise}))


def test_what_the_scope_sets(context: Any, monkeypatch: Any) -> None:
    scope = {"data_root": "/data", "device": "cuda:1", "workers": 4, "threads": 8, "compile": True}
    config = site_config(context(simulated=False, scope=scope))
    assert (config.devices, config.workers, config.threads, config.compile) == (("cuda:1",), 4, 8, True)
    assert not site_config(context(simulated=False, scope={"data_root": "/data"})).compile
    for several, each in (("cuda:0,cuda:12", ("cuda:0", "cuda:12")), ("cpu, cpu", ("cpu", "cpu"))):
        assert site_config(context(simulated=False, scope=scope | {"device": several})).devices == each
    assert site_config(context(simulated=False, scope={"data_root": "/data"})).workers is None, "as the task needs"
    assert site_config(context(simulated=True)).workers == 0, "a demo is too small for workers"
    assert config.state_root == Path("/kit/harmofl")
    monkeypatch.setenv("HARMOFL_STATE_ROOT", "/state")
    assert site_config(context(simulated=False, scope=scope)).state_root == Path("/state/HK")


def test_the_server_of_a_simulation_knows_the_sites_roots(context: Any, monkeypatch: Any) -> None:
    job = {"data": {"simulated_root": "/job/{SITE_NAME}"}}
    assert simulated_data_root("UCL", context(simulated=True, settings=job)) == Path("/job/UCL")
    assert simulated_data_root("UCL", context(simulated=True)) is None
    monkeypatch.setenv("HARMOFL_DATA_ROOT", "/data")
    assert simulated_data_root("UCL", context(simulated=False)) is None


def test_the_line_of_a_site_is_printable():
    # the hash of an experiment comes from the server
    line = str(SiteError("experiment_differs", "the server resolves a\n2026-11-30 - INFO - forged\x1b[2J"))
    assert line == "the server resolves a 2026-11-30 - INFO - forged?[2J"
