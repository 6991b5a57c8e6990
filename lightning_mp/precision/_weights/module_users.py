"""Which threads compute with a module: other weights in its place are there for all of them."""

import threading
from collections.abc import Container, Sequence

import torch
from torch import nn

__all__ = ["ModuleUsers"]


class ModuleUsers:
    """Refuses a second thread in a module while one of the two has replaced its weights.

    A forward without grad would put copies into the module that lead to no parameter. Another
    thread that computes at that moment would use the same copies, and its gradients would be lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Threads, and whether they have replaced weights, in the order in which they came.
        self._users: dict[nn.Module, list[tuple[int, bool]]] = {}

    def enter(self, modules: Sequence[nn.Module], swapping: Container[nn.Module]) -> None:
        """Note that this thread computes with modules, and replaces the weights of some.

        Raises:
            RuntimeError: Another thread computes with one of them.
        """
        thread = threading.get_ident()
        with self._lock:
            # This runs for every layer, and seldom is there anybody else.
            shared = [module for module in modules if module in self._users]
            for module in shared:
                if self._is_taken(module, thread, module in swapping) and not _is_autograd_thread():
                    raise RuntimeError(
                        f"A `{type(module).__name__}` was called in the thread "
                        f"{threading.current_thread().name!r} while another thread computes with "
                        "it. `BalancedAMP` puts half weights into a module while it computes, for "
                        "all threads, and gradients would be lost. Call the model in the training "
                        "thread alone, give the other thread a `copy.deepcopy` of it, or pass "
                        "`BalancedAMP(weights='full')`."
                    )
            for module in modules:
                self._users.setdefault(module, []).append((thread, module in swapping))

    def _is_taken(self, module: nn.Module, thread: int, is_swapping: bool) -> bool:
        others = [swapped for other, swapped in self._users[module] if other != thread]
        return any(others) or (is_swapping and bool(others))

    def leave(self, modules: Sequence[nn.Module]) -> None:
        """Note that this thread is done with the modules that it entered last."""
        thread = threading.get_ident()
        with self._lock:
            for module in modules:
                users = self._users[module]
                if len(users) == 1:  # else a copy of the model would live as long as the training
                    del self._users[module]
                else:
                    del users[max(i for i, (other, _) in enumerate(users) if other == thread)]


def _is_autograd_thread() -> bool:
    """Return whether autograd's thread of a device runs this, and who called the backward waits."""
    # Such a thread runs the forwards of activation checkpointing again. Python has not started it.
    is_in_backward = torch._C._current_graph_task_id() != -1
    return is_in_backward and isinstance(threading.current_thread(), threading._DummyThread)
