"""A server's run and FL context without a federation, and answers as they come off the wire."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from toy_answers import difference

from harmofl.core.training import arrays_sha256
from harmofl.experiment import resolve, set_key
from harmofl.flare.aggregator import HarmoFLAggregator
from harmofl.flare.server_run import _KEY, ServerRun
from harmofl.flare.wire import UpdateMessage, pack_update

ROUND = 4


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """The global model: a matrix, a scalar, a counter."""
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scale": np.array(1.5, np.float32),
        "count": np.array(7, np.int64),
    }


@pytest.fixture
def make_run(written: dict[str, Any], tmp_path: Path) -> Callable[..., ServerRun]:
    """A run of sites A, B and C; settings are changed by `section.key`."""

    def make(changes: dict[str, Any] | None = None) -> ServerRun:
        for key, value in (changes or {}).items():
            set_key(written, key, value)
        return ServerRun(resolve(written), False, tmp_path, ["A", "B", "C"], run_id="0123abcd")

    return make


@pytest.fixture
def make_context(weights: dict[str, np.ndarray]) -> Callable[..., FLContext]:
    """The server's context in round 4, as ScatterAndGather leaves it when answers come in."""

    def make(run: ServerRun | None) -> FLContext:
        manager = FLContextManager(None, "server", "job", {}, {})
        context = manager.new_context()
        context.set_prop(AppConstants.CURRENT_ROUND, ROUND, private=True, sticky=True)
        context.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(weights, {}), private=True, sticky=True)
        if run is not None:
            run.model_sha256 = arrays_sha256(weights)
            context.set_prop(_KEY, run, private=True, sticky=True)
        return context

    return make


@pytest.fixture
def numbers(weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """What a site tells about a round."""
    return {
        "cases": {"training": 5, "validation": 2, "test": 2},
        "skipped": {},
        "demo": False,
        "steps": 10,
        "skipped_steps": 0,
        "images": 40,  # in batches of 4
        "loss": 0.5,
        "validation": 0.25,
        "seconds": 0.5,
        "received_sha256": arrays_sha256(weights),
    }


def over_the_wire(shareable: Shareable) -> Shareable:
    """Through FLARE's own serialization."""
    common_decomposers.register()
    received: Shareable = fobs.loads(fobs.dumps(shareable))
    return received


@pytest.fixture
def wire() -> Callable[[Shareable], Shareable]:
    """FLARE's serialization, there and back."""
    return over_the_wire


@pytest.fixture
def answer(numbers: dict[str, Any]) -> Callable[..., Shareable]:
    """A site's answer as the server receives it: packed, serialized, with cookie and peer."""

    def make(
        site: str | None, difference: Any, round_number: int | None = ROUND, amplitude: Any = None, **changed: Any
    ) -> Shareable:
        told = {key: value for key, value in (numbers | changed).items() if value is not ...}
        if "steps" not in changed and type(changed.get("images")) is int:
            told["steps"] = -(-changed["images"] // 4)
        packed = pack_update(UpdateMessage(difference, amplitude, numbers))
        dxo = from_shareable(packed)  # a site of another version does not check what it tells
        dxo.set_meta_prop("harmofl.numbers", told)
        shareable = over_the_wire(dxo.update_shareable(packed))
        if round_number is not None:
            shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, round_number)
        if site is not None:
            shareable.set_peer_props({ReservedKey.IDENTITY_NAME: site})
        return shareable

    return make


@pytest.fixture
def opened(make_run, make_context):
    """An aggregator in a run, by settings: (aggregator, run, context)."""

    def make(changes=None):
        run = make_run(changes)
        return HarmoFLAggregator(), run, make_context(run)

    return make


@pytest.fixture
def healthy(opened, answer):
    """The same, with site A accepted."""

    def make(changes=None, **told):
        aggregator, run, context = opened(changes)
        assert aggregator.accept(answer("A", difference(2.0), **told), context)
        return aggregator, run, context

    return make
