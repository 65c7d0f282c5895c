"""Adam and SGD of torch, without the import of torch.compile's tracer that the first use of either makes.

`torch.optim` decorates its methods so that torch.compile leaves them alone. The decorators import torch._dynamo when
they are first called, about a second in each process, whether or not anything is compiled; torch 2.13 has no switch for
it. No optimizer is compiled here. So these classes inherit from torch's own, and take from them the functions that were
decorated, which `functools.wraps` keeps for everyone. Nothing of torch is altered: other code gets its classes as ever.
"""

import inspect

import torch


class _Untraced(torch.optim.Optimizer):
    """The methods that every optimizer of torch shares, as they are without their decorators."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class Adam(_Untraced, torch.optim.Adam):
    """`torch.optim.Adam`, the same to the bit; never differentiable, and not for code that torch.compile compiles."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class SGD(_Untraced, torch.optim.SGD):
    """`torch.optim.SGD`, the same to the bit; never differentiable, and not for code that torch.compile compiles."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
