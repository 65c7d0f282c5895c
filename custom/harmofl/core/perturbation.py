"""Weight perturbation (HarmoFL Eqs 5-7): single-step sharpness-aware minimization around any torch optimizer."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from harmofl.core.device_kinds import kind_of


@dataclass(frozen=True)
class StepResult:
    """What one step did: ``loss`` of the unperturbed pass and whether it was skipped, both left on the device."""

    loss: Tensor
    skipped: bool | Tensor


@contextmanager
def frozen_batch_statistics(module: torch.nn.Module) -> Iterator[None]:
    """Let batch norm layers in training mode use the batch's statistics without recording them.

    Layers in evaluation mode go on using their running statistics. Not done by momentum 0: that still counts the batch,
    and 0 times an infinite batch mean is NaN.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    try:
        for layer in layers:
            layer.track_running_stats = False
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Global L2 norm of the gradients of ``parameters``, a float32 scalar on the first one's device; 0 for none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    device = gradients[0].device
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]))


class WeightPerturbation:
    """Step from theta along the gradient at theta + delta, delta = alpha g / ||g|| (HarmoFL Eqs 6-7).

    The norm runs over all parameters that have a gradient after the first pass; the others are left alone. With alpha 0
    every step is a plain one of the base optimizer. With a fused optimizer on a GPU and without a loss scaler nothing
    is read from the device: whether a gradient can be used is decided there. Else one number is read after each pass.

    Args:
        optimizer: the base optimizer, foreach or fused; its ``param_groups`` stay the only ones.
        alpha: length of the perturbation, 0 or more.
        module: the network; when given, its batch norm layers record the first pass only.

    Raises:
        ValueError: alpha is negative or not finite.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, alpha: float, module: torch.nn.Module | None = None) -> None:
        if not (math.isfinite(alpha) and alpha >= 0):
            raise ValueError(f"alpha is {alpha}: choose a finite value of 0 or more")
        self.optimizer = optimizer
        self.alpha = alpha
        self.module = module
        self._room: list[Tensor] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's own groups: a learning rate set here is set there."""
        return self.optimizer.param_groups

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Hold the weights at theta + alpha g / ||g||, and put them back bit for bit whatever happens inside.

        Without a finite gradient above 0 the weights stay where they are.
        """
        parameters = self._parameters()
        norm = float(gradient_norm(parameters))
        with self._ascended(parameters, self.alpha / norm) if _usable(norm) else nullcontext():
            yield

    def step(
        self,
        closure: Callable[[], Tensor],
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
    ) -> StepResult:
        """Take one step, or leave weights and moments as they are when a pass gives no usable gradient.

        Skipped are: a gradient that is not finite in either pass, and a first gradient of exactly 0, which has no
        direction. The weights are back in place before the base optimizer moves them, and when ``closure`` raises.

        Args:
            closure: runs the forward pass and returns the scalar loss, without backward; called once a pass.
            scaler: loss scaler of float16 training; updated once, its scale lowered when a pass overflowed.
            clip_norm: largest norm of the gradient that the base optimizer gets (the second one).

        Returns:
            The loss of the first pass and whether the step was skipped.
        """
        if scaler is None and self._fused_on_device():
            return self._step_on_device(closure, clip_norm)
        loss = self._backward(closure, scaler)
        if self.alpha > 0:
            parameters = self._parameters()
            norm = self._unscaled_norm(parameters, scaler)
            if not _usable(norm):
                self._close(scaler)
                return StepResult(loss, skipped=True)
            with self._ascended(parameters, self.alpha / norm), self._frozen_statistics():
                self._backward(closure, scaler)
        return StepResult(loss, skipped=not self._descend(scaler, clip_norm))

    def _step_on_device(self, closure: Callable[[], Tensor], clip_norm: float | None) -> StepResult:
        """The same step without a number read on the way, which would wait for all kernels launched so far.

        Both passes always run; the fused optimizer leaves weights and moments alone where ``found_inf`` says so.
        """
        loss = self._backward(closure, None)
        parameters = self._parameters()
        if not parameters:  # every layer is frozen
            return StepResult(loss, skipped=self.alpha > 0)
        usable = torch.ones((), dtype=torch.bool, device=loss.device)
        if self.alpha > 0:
            norm = gradient_norm(parameters)
            usable = (norm > 0) & torch.isfinite(norm)
            # in float64, as Python divides on the other path
            factor = torch.where(usable, self.alpha / norm.double(), 0.0).float()
            with self._ascended(parameters, factor), self._frozen_statistics():
                self._backward(closure, None)
        parameters = self._parameters()
        norm = gradient_norm(parameters).to(loss.device)
        skipped = ~(usable & torch.isfinite(norm))
        if clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        self.optimizer.found_inf = skipped.float()  # as a GradScaler hands it over
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.found_inf
        return StepResult(loss, skipped)

    def state_dict(self) -> dict[str, Any]:
        """Alpha and the whole state of the base optimizer, its moments included."""
        return {"alpha": self.alpha, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken, also of weights in another memory format.

        Fused optimizers go through weights and moments as they lie in memory.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                if isinstance(moment, Tensor) and moment.shape == parameter.shape:
                    moments[name] = torch.empty_like(parameter, dtype=moment.dtype, requires_grad=False).copy_(moment)
        self.alpha = float(state["alpha"])

    def _parameters(self) -> list[Tensor]:
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]

    def _backward(self, closure: Callable[[], Tensor], scaler: torch.amp.GradScaler | None) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = closure()
            if loss.requires_grad:  # not where every layer is frozen: no gradient then, and the step is skipped
                (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    def _unscaled_norm(self, parameters: list[Tensor], scaler: torch.amp.GradScaler | None) -> float:
        """Norm after pass 1, unscaled by hand: the scaler allows one unscale_ a step, which pass 2 needs."""
        if scaler is not None and parameters:
            torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0 / scaler.get_scale())
        return float(gradient_norm(parameters))

    def _fused_on_device(self) -> bool:
        groups = self.optimizer.param_groups
        return all(group.get("fused") and kind_of(group["params"][0].device).runs_ahead for group in groups)

    def _frozen_statistics(self) -> AbstractContextManager[None]:
        return nullcontext() if self.module is None else frozen_batch_statistics(self.module)

    @contextmanager
    def _ascended(self, parameters: list[Tensor], factor: float | Tensor) -> Iterator[None]:
        room, self._room = self._room_for(parameters), []  # taken: another perturbation inside this one gets its own
        weights = [parameter.data for parameter in parameters]
        with torch.no_grad():
            self._ascend(parameters, factor, room)
        try:
            _hold(parameters, room)
            yield
        finally:
            _hold(parameters, weights)
            self._room = room

    @staticmethod
    def _ascend(parameters: list[Tensor], factor: float | Tensor, room: list[Tensor]) -> None:
        """Write the perturbed weights into the room."""
        gradients = [parameter.grad for parameter in parameters]
        if isinstance(factor, Tensor) or any(parameter.dtype != torch.float32 for parameter in parameters):
            # foreach_add takes its factor as a number, and in the weights' type, too large for float16
            torch._foreach_copy_(room, parameters)
            torch._foreach_add_(room, torch._foreach_mul(gradients, factor))
        elif (
            parameters and not kind_of(parameters[0].device).runs_ahead
        ):  # one pass; foreach has no form that writes elsewhere
            for parameter, gradient, perturbed in zip(parameters, gradients, room, strict=True):
                torch.add(parameter, gradient, alpha=factor, out=perturbed)
        else:
            torch._foreach_copy_(room, parameters)
            torch._foreach_add_(room, gradients, alpha=factor)

    def _room_for(self, parameters: list[Tensor]) -> list[Tensor]:
        """Where perturbed weights lie; kept from step to step, for fresh pages cost more than the sum."""
        if [_form(room) for room in self._room] != [_form(parameter) for parameter in parameters]:
            self._room = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        return self._room

    def _descend(self, scaler: torch.amp.GradScaler | None, clip_norm: float | None) -> bool:
        """Step the base optimizer from the gradients at hand; False when they are not finite."""
        parameters = self._parameters()
        if scaler is not None and parameters:
            scaler.unscale_(self.optimizer)
        norm = gradient_norm(parameters)
        finite = bool(torch.isfinite(norm))
        if finite:
            if clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
            if scaler is None:
                self.optimizer.step()
            elif parameters:
                scaler.step(self.optimizer)
        if scaler is not None and parameters:
            scaler.update()
        return finite

    def _close(self, scaler: torch.amp.GradScaler | None) -> None:
        """Let the scaler see the gradient of a skipped step: an infinite one lowers its scale."""
        if scaler is not None and self._parameters():
            scaler.unscale_(self.optimizer)
            scaler.update()


def _hold(parameters: list[Tensor], values: list[Tensor]) -> None:
    """Let parameters hold other memory: nothing is copied, and what they held before stays as it is."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    # an autocast around the whole step holds half-precision copies of the weights
    torch.clear_autocast_cache()


def _usable(norm: float) -> bool:
    return 0 < norm < math.inf


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
