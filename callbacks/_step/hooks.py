"""Hooks of monitors on modules, gradients, functions and optimizers; the recorder removes them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.callbacks._step.functions import FunctionMode

__all__ = ["Hooks"]


class Hooks:
    """Registers hooks that last until `remove`."""

    def __init__(self) -> None:
        self._registered = ExitStack()

    def on_output(self, module: nn.Module, receive: Callable[[Any], object]) -> None:
        """Pass every output of a module to `receive`."""
        handle = module.register_forward_hook(partial(_pass_output, receive))
        self._registered.enter_context(handle)

    def on_input(
        self,
        module: nn.Module,
        receive: Callable[[tuple[Any, ...], dict[str, Any]], object],
        *,
        is_first: bool = False,
    ) -> None:
        """Pass the arguments of every call to `receive`; first: before other hooks cast them."""
        hook = partial(_pass_input, receive)
        handle = module.register_forward_pre_hook(hook, prepend=is_first, with_kwargs=True)
        self._registered.enter_context(handle)

    def on_gradient(self, tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
        """Pass the gradient with respect to a tensor to `receive`."""
        self._registered.enter_context(tensor.register_hook(receive))

    def on_functions(
        self,
        modules: Mapping[str, nn.Module],
        receive: Callable[[str, Mapping[str, Tensor]], object],
    ) -> None:
        """Pass measurements of functions that modules call to `receive`; see `FunctionMode`."""
        self._registered.enter_context(FunctionMode(modules, receive))

    def on_step(
        self,
        optimizer: Optimizer,
        before: Callable[..., None],
        after: Callable[..., None] | None = None,
    ) -> None:
        """Call `before` and `after` around every step of an optimizer."""
        self._registered.enter_context(optimizer.register_step_pre_hook(before))
        if after is not None:
            self._registered.enter_context(optimizer.register_step_post_hook(after))

    def remove(self) -> None:
        """Remove all hooks."""
        self._registered.close()


def _pass_output(receive: Callable[[Any], object], _: nn.Module, __: Any, output: Any) -> None:
    receive(output)


def _pass_input(
    receive: Callable[[Any, Any], object], _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    receive(args, kwargs)
