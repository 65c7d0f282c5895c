"""HarmoFLShareableGenerator: global model to task data, mean difference to the next global model."""

import numpy as np
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.shareable_generator import ShareableGenerator
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.training import arrays_sha256
from harmofl.flare.server_run import current_run
from harmofl.flare.wire import Arrays, ModelMessage, pack_model


class HarmoFLShareableGenerator(ShareableGenerator):
    """Sends weights with the frozen amplitude and the run's header; applies the server learning rate."""

    def learnable_to_shareable(self, model: ModelLearnable, fl_ctx: FLContext) -> Shareable:
        """The data of a train task."""
        run = current_run(fl_ctx)
        run.model_sha256 = arrays_sha256(model[ModelLearnableKey.WEIGHTS])
        message = ModelMessage(model[ModelLearnableKey.WEIGHTS], run.amplitude)
        return run.header(fl_ctx.get_prop(AppConstants.CURRENT_ROUND)).attach(pack_model(message))

    def shareable_to_learnable(self, shareable: Shareable, fl_ctx: FLContext) -> ModelLearnable:
        """The next global model, theta + eta_g * mean difference (Algorithm 1)."""
        rate = current_run(fl_ctx).experiment.federation.server_learning_rate
        held = fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        return make_model_learnable(apply_difference(held, from_shareable(shareable).data, rate), {})


def apply_difference(weights: Arrays, difference: Arrays, rate: float) -> Arrays:
    """Weights moved by `rate` times the difference, in float32; counters take the whole of their maximum difference.

    Raises:
        ValueError: the moved weights are not finite, and must not become the global model.
    """
    moved = {}
    for name, value in weights.items():
        change = difference[name]
        if np.issubdtype(value.dtype, np.floating):
            moved[name] = value + np.asarray(rate, value.dtype) * change
            if not np.isfinite(moved[name]).all():
                raise ValueError(
                    f"the global model would not be finite in {name}; lower federation.server_learning_rate"
                )
        else:
            moved[name] = (value + change).astype(value.dtype)
    return moved
