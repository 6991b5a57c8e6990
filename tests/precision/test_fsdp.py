"""FSDPBalancedAMP and ModelParallelBalancedAMP on two gloo ranks, against one process in fp32."""

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_mp.precision.fsdp import FSDPBalancedAMP
from lightning_mp.precision.loss_scale_config import LossScaleConfig
from lightning_mp.precision.model_parallel import ModelParallelBalancedAMP
from tests.precision.models import (
    Block,
    Regression,
    Transformer,
    fit,
    gradients_of,
    parameters_of,
    sequences,
)
from tests.processes import run_ranks

pytestmark = pytest.mark.distributed

RANKS, STEPS, BAD = 2, 6, 2
PLUGINS: dict[str, Any] = {"fsdp": FSDPBalancedAMP, "model_parallel": ModelParallelBalancedAMP}
SCALE = LossScaleConfig(init_scale=2.0**10, growth_interval=3)
CLIPPING = {
    "norm": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}


class _Network(Transformer):
    """Its last bias, in the shard of one rank, can have an inf gradient."""

    is_bad = False

    def forward(self, tokens: Tensor) -> Tensor:
        bias = self.head.bias.view_as(self.head.bias)
        if self.is_bad:
            bias.register_hook(lambda gradient: gradient * torch.inf)
        return super().forward(tokens) + (bias - bias.detach())


class _Model(Regression):
    """Shards itself if required, and gathers its weights when training ends."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_Network, **kwargs)
        self.seen: set[tuple[str, torch.dtype]] = set()
        for name in ("norm", "head", "blocks.0.norm1", "blocks.1.up"):
            hook = functools.partial(self._see, name)
            self.network.get_submodule(name).register_forward_pre_hook(hook)

    def _see(self, name: str, module: nn.Module, _: Any) -> None:
        self.seen.add((name, module.weight.dtype))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.network.is_bad = batch_idx in self.bad_batches
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        square = sum(_local(g).double().square().sum() for g in gradients_of(optimizer))
        square = torch.as_tensor(square)
        if dist.is_initialized():
            dist.all_reduce(square)
        self.gradient_norms.append(square.item() ** 0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_train_end(self) -> None:
        root = self.trainer.strategy.model
        if any(isinstance(module, FullyShardedDataParallel) for module in root.modules()):
            with FullyShardedDataParallel.summon_full_params(root, writeback=False):
                self.end = parameters_of(self)
        else:
            full = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
            self.end = torch.cat([p.detach().double().flatten() for p in full])


class _SelfSharding(_Model):
    def configure_model(self) -> None:
        plugin, mesh = self.trainer.precision_plugin, self.device_mesh["data_parallel"]
        plugin.shard_fp32_modules(self, mesh)
        for block in self.network.blocks:
            fully_shard(block, mesh=mesh, mp_policy=plugin.mp_policy)
        fully_shard(self.network, mesh=mesh, mp_policy=plugin.mp_policy)


class _Manual(_Model):
    """Steps two optimizers, for the blocks and the rest, each clipped by its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_model(self) -> None:
        # FSDP does not support a backward inside its forward, which wraps `training_step`.
        plugin = self.trainer.precision_plugin
        is_wrapped = isinstance(self.network, FullyShardedDataParallel)
        if isinstance(plugin, FSDPBalancedAMP) and not is_wrapped:
            self.network = FullyShardedDataParallel(
                self.network,
                mixed_precision=plugin.mixed_precision_config,
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )

    def configure_optimizers(self) -> list[Optimizer]:
        is_block = {name: ".blocks." in f".{name}" for name, _ in self.named_parameters()}
        return [
            SGD([p for name, p in self.named_parameters() if is_block[name] == chosen], lr=0.1)
            for chosen in (True, False)
        ]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()


class _CPUStrategy(FSDPStrategy):
    """Runs FSDP on a CPU by overriding checks for a GPU in torch and Lightning."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            return model
        return FullyShardedDataParallel(
            model,
            mixed_precision=self.mixed_precision_config,
            device_id=self.root_device,
            **self.kwargs,
        )


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def batches(rank: int | None = None) -> DataLoader:
    """Return global batches, or the rank's half of each batch."""
    rows = slice(None) if rank is None else slice(rank, None, RANKS)
    parts = [[part[rows] for part in batch] for batch in sequences(STEPS, 16)]
    return DataLoader(parts, batch_size=None)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=3e-3)


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.03, momentum=0.9)


def fit_on_ranks(model: Any, plugin: Any, rank: int, wrap: Any = None, **kwargs: Any) -> Any:
    strategy: Any = ModelParallelStrategy(RANKS, 1)
    if isinstance(plugin, FSDPBalancedAMP):
        # Not "full", because torch crashes when it gathers full weights on a CPU.
        strategy = _CPUStrategy(
            auto_wrap_policy={Block} if wrap is None else wrap, state_dict_type="sharded"
        )
    kwargs = {"devices": RANKS, "use_distributed_sampler": False, **kwargs}
    return fit(model, plugin, batches(rank), strategy=strategy, **kwargs)


def _train_all(rank: int) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}

    def train(name: str, model: _Model, plugin: Any, wrap: Any = None, **kwargs: Any) -> None:
        trainer = fit_on_ranks(model, plugin, rank, wrap, **kwargs)
        results[name] = {
            "end": model.end,
            "norms": model.gradient_norms,
            "seen": model.seen,
            "global_step": trainer.global_step,
            "lr": [group["lr"] for each in trainer.optimizers for group in each.param_groups],
            "scale": plugin.state_dict(),
        }

    for kind, make in PLUGINS.items():
        network = _Model if kind == "fsdp" else _SelfSharding
        train(f"{kind} fp16", network(make_optimizer=momentum), make(loss_scale=SCALE))
        train(f"{kind} norm", network(), make(loss_scale=SCALE), **CLIPPING["norm"])
        half = make(loss_scale=SCALE, reduce_dtype="half")
        train(f"{kind} value", network(), half, **CLIPPING["value"])
        train(f"{kind} bf16 norm", network(), make(half="bf16"), **CLIPPING["norm"])
        bad = network(bad_batches=[BAD] if rank == 1 else [], interval="step")
        train(f"{kind} bad", bad, make(loss_scale=LossScaleConfig(init_scale=2.0**10)))
    train("manual", _Manual(), FSDPBalancedAMP(loss_scale=SCALE, fp32_modules=[]))
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    kept = FSDPBalancedAMP(fp32_modules=["norm", "network.blocks.1.up"])
    train("by size", _Model(make_optimizer=momentum), kept, wrap=by_size)
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    first, second = run_ranks(_train_all, RANKS)
    for name, result in first.items():
        assert torch.equal(result["end"], second[name]["end"])
        assert result["scale"] == second[name]["scale"]
        assert result["global_step"] == second[name]["global_step"]
    return first


def error_of(end: Tensor, expected: Tensor) -> float:
    start = parameters_of(_Model())
    return ((end - expected).norm() / (expected - start).norm()).item()


def reference(model: _Model, **kwargs: Any) -> Tensor:
    fit(model, None, batches(), **kwargs)
    return model.end


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLUGINS)
def test_two_ranks_equal_one_process_in_fp32(results: Any, kind: str) -> None:
    """FSDPPrecision of Lightning ignores a loss scaler (Lightning#19803)."""
    result = results[f"{kind} fp16"]
    assert error_of(result["end"], reference(_Model(make_optimizer=momentum))) < 2**-9
    assert result["global_step"] == STEPS
    assert result["scale"]["scale"] == 2.0**12  # after two growths


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize(
    ("name", "half"), [("fp16", torch.float16), ("bf16 norm", torch.bfloat16)], ids=["fp16", "bf16"]
)
def test_working_weights_are_half_except_in_norms(
    results: Any, kind: str, name: str, half: torch.dtype
) -> None:
    norms = {("norm", torch.float32), ("blocks.0.norm1", torch.float32)}
    assert results[f"{kind} {name}"]["seen"] == {("head", half), ("blocks.1.up", half), *norms}


def test_fp32_modules_stay_fp32_under_a_size_based_wrap_policy(results: Any) -> None:
    assert ("blocks.1.up", torch.float32) in results["by size"]["seen"]
    assert ("norm", torch.float32) in results["by size"]["seen"]
    assert ("head", torch.float16) in results["by size"]["seen"]
    assert error_of(results["by size"]["end"], reference(_Model(make_optimizer=momentum))) < 2**-9


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize("name", [*CLIPPING, "bf16 norm"])
def test_clipping_equals_one_process_in_fp32(results: Any, kind: str, name: str) -> None:
    """FSDPPrecision of Lightning does not clip by norm (Lightning#19235)."""
    expected = reference(_Model(), **CLIPPING[name.split()[-1]])
    result, bound = results[f"{kind} {name}"], 2**-7 if "bf16" in name else 2**-9
    assert error_of(reference(_Model()), expected) > 0.3  # clipping changes the result
    assert error_of(result["end"], expected) < bound
    assert min(result["norms"]) > CLIPPING["norm"]["gradient_clip_val"]


def test_manual_optimizers_are_clipped_by_their_own_norms(results: Any) -> None:
    assert error_of(results["manual"]["end"], reference(_Manual())) < 2**-9


@pytest.mark.parametrize("kind", PLUGINS)
def test_all_ranks_skip_if_one_shard_overflows(results: Any, kind: str) -> None:
    result = results[f"{kind} bad"]
    assert result["global_step"] == STEPS - 1
    assert result["lr"] == [pytest.approx(0.1 * 0.9 ** (STEPS - 1))]
    assert result["scale"]["scale"] == 2.0**9
    assert result["scale"]["skipped_steps"] == 1
    model = _Model(interval="step")
    data = [batch for index, batch in enumerate(batches()) if index != BAD]
    fit(model, None, DataLoader(data, batch_size=None))
    assert error_of(result["end"], model.end) < 2**-7


# --- checkpoints ---------------------------------------------------------------------------------


def _resume(rank: int, folder: str) -> dict[str, tuple[Tensor, Tensor, Any, Any]]:
    results = {}
    for kind, make in PLUGINS.items():
        network = _Model if kind == "fsdp" else _SelfSharding
        path = f"{folder}/{kind}"
        whole = network(make_optimizer=adamw)
        fit_on_ranks(whole, make(loss_scale=SCALE), rank, max_epochs=2)
        trainer = fit_on_ranks(network(make_optimizer=adamw), make(loss_scale=SCALE), rank)
        state = trainer.precision_plugin.state_dict()
        saved = trainer._checkpoint_connector.dump_checkpoint()[make.__name__]
        trainer.save_checkpoint(path)
        rest = network(make_optimizer=adamw, seed=1)
        plugin = make(loss_scale=SCALE)
        fit_on_ranks(rest, plugin, rank, max_epochs=2, ckpt_path=path)
        results[kind] = (whole.end, rest.end, saved, state)
    return results


@pytest.mark.sweep
def test_run_resumes_bit_for_bit_from_a_checkpoint() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, _ = run_ranks(_resume, RANKS, folder)
    for expected, value, saved, state in first.values():
        assert torch.equal(value, expected)
        assert saved == state
        assert saved["scale"] == 2.0**12


# --- errors --------------------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "half": ({"half": "fp8"}, "`half` must be one of 'fp16', 'bf16'"),
    "reduce_dtype": ({"reduce_dtype": "fp16"}, "`reduce_dtype` must be one of 'fp32', 'half'"),
    "bf16 scale": ({"half": "bf16", "loss_scale": "dynamic"}, "needs no loss scale"),
    "unknown scale": ({"loss_scale": "static"}, "loss_scale='static'"),
    "fp32 op": ({"fp32_ops": ["sotfmax"]}, "Similar names: .*softmax"),
}


@pytest.mark.parametrize("kind", PLUGINS)
@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_invalid_arguments_raise(kind: str, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLUGINS[kind](**arguments)


def test_unknown_modules_and_unsupported_strategies_raise() -> None:
    with pytest.raises(ValueError, match="Similar names: .*'LayerNorm'"):
        fit(_Model(), FSDPBalancedAMP(fp32_modules=["LayreNorm"]), batches())
    with pytest.raises(
        MisconfigurationException, match="'network.blocks.0.norm1' is not .*ModelParallelStrategy"
    ):
        fit(_Model(), ModelParallelBalancedAMP(), batches())
    with pytest.raises(MisconfigurationException, match="no module is wrapped in FSDP"):
        fit(_Model(), FSDPBalancedAMP(), batches())


def _misconfigure(rank: int) -> list[str]:
    messages = []
    for wrap in (lambda **_: False, {nn.TransformerEncoderLayer}):
        kwargs: dict[str, Any] = {} if callable(wrap) else {"auto_wrap_policy": wrap}
        strategy = _CPUStrategy(**kwargs)
        try:
            fit(_Model(), FSDPBalancedAMP(), batches(rank), strategy=strategy, devices=RANKS)
            messages.append("")
        except MisconfigurationException as error:
            messages.append(str(error))
    return messages


def test_norm_that_fsdp_would_gather_in_half_raises() -> None:
    for without_policy, with_policy in run_ranks(_misconfigure, RANKS):
        assert "gathers 'network.blocks.0.norm1' in half" in without_policy
        assert "auto_wrap_policy={Block})` without `mixed_precision`, wrap" in without_policy
        assert with_policy == ""


class _StepsPastThePlugin(_Model):
    """Steps an optimizer of its shards that `configure_optimizers` does not return."""

    def on_fit_start(self) -> None:
        self.own = SGD(self.network.parameters(), lr=0.1)

    def on_after_backward(self) -> None:
        self.own.step()


class _ShardsAndStepsPastThePlugin(_StepsPastThePlugin, _SelfSharding):
    pass


def _step_past(rank: int) -> list[str]:
    messages = []
    for kind, make in PLUGINS.items():
        network = _StepsPastThePlugin if kind == "fsdp" else _ShardsAndStepsPastThePlugin
        with pytest.raises(RuntimeError) as caught:
            fit_on_ranks(network(), make(loss_scale=SCALE), rank)
        messages.append(str(caught.value))
    return messages


def test_optimizer_outside_the_trainer_raises_on_scaled_shards() -> None:
    for messages in run_ranks(_step_past, RANKS):
        for make, message in zip(PLUGINS.values(), messages, strict=True):
            assert f"`SGD.step()` was not called through `{make.__name__}`" in message
