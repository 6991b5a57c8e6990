"""A second thread in a module that computes with half copies raises without side effects."""

import _thread
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from lightning_mp import BalancedAMP
from lightning_mp.precision._weights.working_copies import WorkingCopies
from tests.precision.models import Regression, fit, loader
from tests.precision.support_cases import Meeting
from tests.precision.working_models import X, gradients, run

WAIT = 60  # seconds after which a hanging test fails


def in_thread(call: Callable[[], Any], start: Any = None) -> Any:
    """Call in another thread, wait, and return the result or exception."""
    results: list[Any] = []
    done = threading.Event()

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)
        finally:
            done.set()

    if start is None:
        threading.Thread(target=target, name="second").start()
    else:
        start(target, ())
    assert done.wait(WAIT)
    return results[0]


@contextlib.contextmanager
def computing(layer: Meeting, how: Callable[[], Any]) -> Iterator[list[Any]]:
    """Keep a second thread inside a layer; the list receives its result at the end."""
    inside, leave, result = threading.Event(), threading.Event(), []

    def amid() -> None:
        inside.set()
        assert leave.wait(WAIT)

    layer.amid = amid
    thread = threading.Thread(target=lambda: result.append(how()), name="second")
    thread.start()
    assert inside.wait(WAIT)
    try:
        yield result
    finally:
        leave.set()
        thread.join(WAIT)


@torch.no_grad()
def half_without_grad(layer: nn.Module) -> Tensor:
    return run(layer, X)


@torch.no_grad()
def full_without_grad(layer: nn.Module) -> Tensor:
    return layer(X)


WAYS: dict[str, Callable[[nn.Module], Tensor]] = {
    "half": lambda layer: run(layer, X),
    "half without grad": half_without_grad,
    "fp32": full_without_grad,
}
ways = pytest.mark.parametrize("other", WAYS.values(), ids=WAYS)
REFUSED = "called in the thread 'second' while another thread computes"


@ways
def test_second_thread_raises_and_changes_no_gradient(other: Any, attached: Any) -> None:
    torch.manual_seed(0)
    layer = Meeting(6, 4)
    attached(layer)
    expected = gradients(layer, X)
    errors = []
    layer.amid = lambda: errors.append(in_thread(lambda: other(layer)))
    found = gradients(layer, X)
    assert all(map(torch.equal, found, expected))
    assert len(found) == 2
    assert isinstance(errors[0], RuntimeError)
    assert REFUSED in str(errors[0])
    # Afterwards, other threads may call the layer.
    assert isinstance(in_thread(lambda: other(layer)), Tensor)


@ways
def test_training_thread_raises_if_another_thread_was_first(other: Any, attached: Any) -> None:
    torch.manual_seed(0)
    layer = Meeting(6, 4)
    attached(layer)
    expected, alone = gradients(layer, X), other(layer)
    with (
        computing(layer, lambda: other(layer)) as result,
        pytest.raises(RuntimeError, match="in the thread 'MainThread' while another thread"),
    ):
        run(layer, X)
    assert torch.equal(result[0], alone)
    assert all(map(torch.equal, gradients(layer, X), expected))


@ways
def test_optimizer_step_beside_a_computing_thread_is_kept(other: Any, attached: Any) -> None:
    """The fp32 weights then differ from their copies, but the forward of the thread wrote none."""
    torch.manual_seed(0)
    layer = Meeting(6, 4)
    copies, optimizer = attached(layer), SGD(layer.parameters(), lr=0.1)
    gradients(layer, X)
    copies.start_step()  # the first step compares weights with copies
    expected = [p.detach() - 0.1 * p.grad for p in layer.parameters()]
    with computing(layer, lambda: other(layer)):
        optimizer.step()
    torch.testing.assert_close(list(layer.parameters()), expected)


def test_thread_that_computes_during_the_optimizer_step_makes_no_copies(attached: Any) -> None:
    """A copy of partly updated weights could overwrite the next copy."""
    layer = nn.Sequential(Meeting(6, 4))
    copies = attached(layer)
    gradients(layer, X)
    SGD(layer.parameters(), lr=0.1).step()
    held = [entry.beside.clone() for _, entry in copies._ledger]
    in_thread(lambda: half_without_grad(layer))
    assert all(map(torch.equal, held, [entry.beside for _, entry in copies._ledger]))


def test_threads_that_replace_no_weight_compute_concurrently(attached: Any) -> None:
    layer = Meeting(6, 4)
    attached(layer)
    with computing(layer, lambda: full_without_grad(layer)) as result:
        here = full_without_grad(layer)
    assert torch.equal(result[0], here)


@pytest.mark.parametrize("remedy", ["copy", "full"])
def test_remedies_in_the_error_work(remedy: str, attached: Any) -> None:
    torch.manual_seed(0)
    layer = Meeting(6, 4)
    if remedy == "copy":
        attached(layer)
    other = copy.deepcopy(layer) if remedy == "copy" else layer
    expected = gradients(layer, X)
    results = []
    layer.amid = lambda: results.append(in_thread(lambda: half_without_grad(other)))
    assert all(map(torch.equal, gradients(layer, X), expected))
    assert isinstance(results[0], Tensor)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_the_thread_of_autograd_is_allowed(
    use_reentrant: bool, attached: Any
) -> None:
    """On a GPU, autograd recomputes in a thread of its own while the caller waits."""
    torch.manual_seed(0)
    layer = Meeting(6, 4)
    attached(layer)
    expected = gradients(layer, X)
    x = X.clone().requires_grad_()
    loss = run(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant), x)
    loss = loss.float().square().mean()
    layer.zero_grad()
    results = []

    def backward() -> None:
        # Like the threads of CUDA, unknown to `threading`.
        results.append(in_thread(loss.backward, _thread.start_new_thread))

    layer.amid = backward
    run(layer, X)  # replaces weights in the main thread, which waits
    assert results == [None]
    found = [p.grad for p in layer.parameters()]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_module_within_itself_is_allowed(use_reentrant: bool, attached: Any) -> None:
    class Recursive(nn.Linear):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            if depth:
                x = checkpoint(self, x, depth - 1, use_reentrant=use_reentrant)
            return super().forward(x)

    torch.manual_seed(0)
    layer = Recursive(6, 6)
    plain = copy.deepcopy(layer)
    x = X.clone().requires_grad_()
    plain(x).square().mean().backward()
    attached(layer)
    found = gradients(layer, x)
    for value, p in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(value, p.grad, rtol=0.02, atol=0.02 * p.grad.norm().item())


def test_thread_beside_the_training_raises_and_training_continues() -> None:
    class Watched(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if batch_idx == 2:
                self.network[0].amid = lambda: errors.append(in_thread(self.look))
            return super().training_step(batch, batch_idx)

        @torch.no_grad()
        def look(self) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.network(torch.ones(3, 8))

    def perceptron() -> nn.Module:
        return nn.Sequential(Meeting(8, 16), nn.GELU(), nn.Linear(16, 1))

    errors: list[Any] = []
    model, alone = Watched(perceptron), Regression(perceptron)
    fit(model, BalancedAMP(), loader(4))
    fit(alone, BalancedAMP(), loader(4))
    assert REFUSED in str(errors[0])
    assert torch.equal(model.weights[-1], alone.weights[-1])


def test_step_that_starts_beside_a_computing_thread_names_the_thread() -> None:
    """The start of a step looks for replaced parameters; half copies of a thread are none."""

    class Watched(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                stack.enter_context(computing(self.network[0], self.look))
                self.added = nn.Identity()

        @torch.no_grad()
        def look(self) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return self.network(torch.ones(3, 8))

    model = Watched(lambda: nn.Sequential(Meeting(8, 16), nn.GELU(), nn.Linear(16, 1)))
    with contextlib.ExitStack() as stack, pytest.raises(RuntimeError, match="while another thread"):
        fit(model, BalancedAMP(), loader(2))


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("keep_vars", [True, False])
def test_state_dict_read_by_another_thread_during_a_forward_has_fp32_weights(
    keep_vars: bool, with_grad: bool
) -> None:
    layer, copies = Meeting(8, 4), WorkingCopies(torch.float16)
    model = nn.Sequential(layer, nn.Linear(4, 2))
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    copies.attach(model)
    states: list[dict[str, Tensor]] = []

    def read() -> None:
        states.append(in_thread(lambda: model.state_dict(keep_vars=keep_vars)))
        states.append({f"0.{k}": v for k, v in layer.state_dict(keep_vars=keep_vars).items()})

    layer.amid = read
    with torch.autocast("cpu", torch.float16), torch.set_grad_enabled(with_grad):
        model(torch.randn(3, 8))
    copies.release()
    assert [len(state) for state in states] == [4, 2]
    for state in states:
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name
            if keep_vars and with_grad:
                assert value is dict(model.named_parameters())[name]
    assert not any(module._state_dict_hooks for module in model.modules())
