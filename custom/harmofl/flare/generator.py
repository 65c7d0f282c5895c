"""HarmoFLShareableGenerator: global model to task data, mean difference to the next global model.

FLARE's global model is the server's own, in float32; what sites receive of it may be rounded (`harmofl.core.exchange`).
"""

from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnable, ModelLearnableKey, make_model_learnable
from nvflare.app_common.abstract.shareable_generator import ShareableGenerator
from nvflare.app_common.app_constant import AppConstants

from harmofl.core.exchange import from_exchange_types
from harmofl.core.training import arrays_sha256
from harmofl.flare.server_run import current_run
from harmofl.flare.wire import ModelMessage, pack_model


class HarmoFLShareableGenerator(ShareableGenerator):
    """Sends weights with the frozen amplitude and the run's header; makes the next model by the run's rule."""

    def learnable_to_shareable(self, model: ModelLearnable, fl_ctx: FLContext) -> Shareable:
        """The data of a train task."""
        run = current_run(fl_ctx)
        weights = run.for_sites(model[ModelLearnableKey.WEIGHTS])
        run.model_sha256 = arrays_sha256(from_exchange_types(weights))
        message = ModelMessage(weights, run.amplitude)
        return run.header(fl_ctx.get_prop(AppConstants.CURRENT_ROUND)).attach(pack_model(message))

    def shareable_to_learnable(self, shareable: Shareable, fl_ctx: FLContext) -> ModelLearnable:
        """The next global model, theta + eta_g * mean difference (Algorithm 1) unless the run has another rule.

        A model that cannot be sent ends the job with its reason, before anything of it is saved.
        """
        run, held = current_run(fl_ctx), fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)[ModelLearnableKey.WEIGHTS]
        try:
            moved = run.rule.next_model(held, from_shareable(shareable).data)
            run.for_sites(moved)
        except ValueError as error:
            self.system_panic(f"round {fl_ctx.get_prop(AppConstants.CURRENT_ROUND)}: {error}", fl_ctx)
            return make_model_learnable(held, {})
        return make_model_learnable(moved, {})
