"""What differs between the kinds of device that torch computes on, in one table: code asks it and names no kind."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harmofl.experiment import Precision


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        runs_ahead: work is queued, and whoever reads a number waits for all of it; decisions are left on the device.
        pinned_copies: batches lie in page-locked memory first, from which a copy runs beside the computation.
        own_generator: it draws random numbers from a generator of its own, beside that of the CPU.
        backend: how processes that train one network together exchange gradients.
        has_bfloat16: whether the device at hand multiplies bfloat16 without emulation.
        has_tf32: whether it may round the float32 inputs of convolutions to 10 bits, as torch's settings stand.
    """

    runs_ahead: bool
    pinned_copies: bool
    own_generator: bool
    backend: str
    has_bfloat16: Callable[[], bool]
    has_tf32: Callable[[], bool]


def _card_has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _card_has_tf32() -> bool:
    return torch.backends.cudnn.allow_tf32 and torch.cuda.is_tf32_supported()


# A CPU without AMX multiplies bfloat16 too, slower than float32: `auto` does not choose it there.
KINDS = {
    "cpu": DeviceKind(False, False, False, "gloo", has_bfloat16=lambda: False, has_tf32=lambda: False),
    "cuda": DeviceKind(True, True, True, "nccl", has_bfloat16=_card_has_bfloat16, has_tf32=_card_has_tf32),
}
# what torch may trace or export on, such as `meta`: nothing can be asked of it
_OTHER = DeviceKind(True, False, False, "gloo", has_bfloat16=lambda: False, has_tf32=lambda: False)


def kind_of(device: torch.device) -> DeviceKind:
    """What is known of a device's kind."""
    return KINDS.get(device.type, _OTHER)


def precision_in_effect(device: torch.device, asked: str) -> Precision:
    """What a network's products are computed in on a device, where an experiment asks for a precision.

    Args:
        device: of the network.
        asked: `training.precision`; `auto` is bfloat16 on a GPU that has it, and float32 elsewhere.

    Returns:
        `tf32` where float32 is asked for and the device rounds the inputs of convolutions, as torch lets GPUs since
        Ampere do unless told otherwise; sums and all other numbers are float32 then.
    """
    kind = kind_of(device)
    if asked == "bfloat16" or (asked == "auto" and kind.has_bfloat16()):
        return "bfloat16"
    if asked == "float16":
        return "float16"
    return "tf32" if kind.has_tf32() else "float32"
