"""Models of transformers that overflow in fp16, with and without the clamp."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.precision.inf_clamp import InfClamp
from lightning_mp.precision.op_policy import OpPolicy

transformers = pytest.importorskip("transformers")

T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5["decoder_start_token_id"] = 0
BART = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 32} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
MODELS = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5_gated": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu"},
    ),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", BART),  # pre-norm
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
}
T5_LIKE = ("t5", "t5_gated", "umt5")
LAST_LAYERS = ("wo", "o", "fc2", "out_proj", "c_proj")
INNER_LAYERS = ("v_proj", "fc1", "c_attn", "c_fc")


def make(kind: str, peak: float = 1.0) -> nn.Module:
    """Return a model with the weights of its last layers multiplied by `peak`, up to 60000."""
    torch.manual_seed(0)
    model, config, arguments = MODELS[kind]
    made = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    for path, module in made.named_modules():
        if peak > 1 and path.split(".")[-1] in LAST_LAYERS:
            module.weight.data.mul_(peak).clamp_(-6e4, 6e4)
        elif peak > 1 and path.split(".")[-1] in INNER_LAYERS:  # initialized to 0.02
            module.weight.data.mul_(30)
    return made.train()


def half(model: nn.Module) -> nn.Module:
    return model.half()


def half_but_wo(model: nn.Module) -> nn.Module:
    """Cast a model as `T5.from_pretrained(..., dtype=torch.float16)` does, with `wo` in fp32."""
    model.half()
    for path, module in model.named_modules():
        if path.endswith(".wo"):
            module.float()
    return model


class Setting(NamedTuple):
    name: str
    convert: object
    is_autocast: bool


HALF = Setting("half", half, False)
HALF_BUT_WO = Setting("half but wo", half_but_wo, False)
AUTOCAST = Setting("autocast", lambda model: model, True)


class Result(NamedTuple):
    logits: Tensor
    gradients: dict[str, Tensor]

    def non_finite_logits(self) -> int:
        return int((~self.logits.isfinite()).sum())

    def non_finite_gradients(self) -> list[str]:
        return [name for name, grad in self.gradients.items() if not grad.isfinite().all()]


def step(model: nn.Module, context: contextlib.AbstractContextManager[object]) -> Result:
    """Run one forward and backward with a fixed dropout mask."""
    torch.manual_seed(3)
    ids = torch.randint(3, 64, (2, 7))
    model.zero_grad()
    with context:
        logits = model(input_ids=ids, labels=ids).logits
    nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    named = model.named_parameters()
    return Result(logits.detach(), {n: p.grad.clone() for n, p in named if p.grad is not None})


def context_of(setting: Setting) -> contextlib.AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.float16, enabled=setting.is_autocast)


def cases() -> Iterator[object]:
    for kind in MODELS:
        for setting in (HALF, HALF_BUT_WO, AUTOCAST):
            if setting is not HALF_BUT_WO or kind in T5_LIKE:
                for factor in (1, 10):
                    name = f"{kind}-{setting.name}-{factor}".replace(" ", "_")
                    yield pytest.param(kind, setting, factor, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "setting", "factor"), [*cases()])
def test_clamp_makes_forward_and_backward_of_an_overflowing_model_finite(
    kind: str, setting: Setting, factor: float
) -> None:
    """The first factor causes a few overflows, the second overflows nearly everywhere."""
    model = setting.convert(make(kind, (3e4 if kind in T5_LIKE else 1e6) * factor))
    without = step(model, context_of(setting))
    assert without.non_finite_logits() > 0
    assert without.non_finite_gradients()
    clamp = InfClamp(["auto"]).attach(model)
    result = step(model, context_of(setting))
    assert result.non_finite_logits() == 0
    assert result.non_finite_gradients() == []
    assert any(grad.count_nonzero() for grad in result.gradients.values())
    assert sum(clamp.counted().values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["zero", "straight_through"])
@pytest.mark.parametrize("setting", [HALF, AUTOCAST], ids=lambda setting: setting.name)
@pytest.mark.parametrize("kind", MODELS)
def test_clamp_without_overflow_changes_no_bit(kind: str, setting: Setting, gradient: str) -> None:
    model = setting.convert(make(kind))
    without = step(model, context_of(setting))
    clamp = InfClamp(["auto"], gradient=gradient).attach(model)
    result = step(model, context_of(setting))
    assert clamp.names
    assert clamp.counts().sum() == 0
    assert torch.equal(result.logits, without.logits)
    assert result.gradients.keys() == without.gradients.keys()
    for name, grad in result.gradients.items():
        # Gradients in the residual stream are summed in another order.
        size = float(without.gradients[name].abs().max())
        torch.testing.assert_close(grad, without.gradients[name], rtol=0.0, atol=size * 2**-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", T5_LIKE)
def test_own_clamp_of_t5_does_not_prevent_nan_under_autocast(kind: str) -> None:
    model = make(kind, 1e5)
    is_finite = {}
    for setting in (AUTOCAST, HALF):
        result = step(setting.convert(model.eval()), context_of(setting))
        is_finite[setting.name] = result.non_finite_logits() == 0
    assert is_finite == {"autocast": False, "half": True}


@pytest.mark.parametrize("kind", T5_LIKE)
def test_own_clamp_of_t5_does_not_prevent_nan_with_dropout(kind: str) -> None:
    """T5 clamps after dropout, which turns dropped inf values into NaN."""
    assert step(half(make(kind, 1e5)), context_of(HALF)).non_finite_logits() > 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("norm_output", ["input", "fp32"])
def test_clamp_under_the_op_policy_makes_forward_and_backward_finite(
    kind: str, norm_output: str
) -> None:
    """Norms are in fp32 and the loss is scaled, as under `BalancedAMP(weights="full")`."""
    policy = OpPolicy(norm_output=norm_output)
    model = make(kind, 1e5 if kind in T5_LIKE else 3e6)
    without = step(model, policy.context("cpu", torch.float16))
    assert without.non_finite_logits() > 0
    clamp = InfClamp(["auto"]).attach(model)
    result = step(model, policy.context("cpu", torch.float16))
    assert result.non_finite_logits() == 0
    assert result.non_finite_gradients() == []
    assert sum(clamp.counted().values()) > 0


@pytest.mark.parametrize("kind", ["pegasus", "gpt2"])
def test_clamp_handles_overflow_in_a_sum_of_finite_values(
    kind: str,
) -> None:
    """No module returns inf; the sum of two values of 40000 overflows in the residual stream."""
    model = half(make(kind).eval())
    for path, module in model.named_modules():
        if path.split(".")[-1] in LAST_LAYERS:
            signs = torch.ones(len(module.bias)).half()
            signs[::2] = -1
            module.bias.data = 40000 * signs
    assert step(model, context_of(HALF)).non_finite_logits() > 0
    clamp = InfClamp(["auto"]).attach(model)
    result = step(model, context_of(HALF))
    assert result.non_finite_logits() == 0
    assert result.non_finite_gradients() == []
    writers = [n for n, count in clamp.counted().items() if count and n.endswith(LAST_LAYERS)]
    assert writers == []


def test_clamp_handles_overflow_in_a_dropout_module() -> None:
    """`wo` returns 60000, and dropout scales it to 60000 / (1 - 0.1) = 66667, which overflows."""
    model = make("t5")
    first = model.encoder.block[0].layer[1].DenseReluDense
    first.wo.register_forward_hook(lambda module, args, output: torch.full_like(output, 60000))
    without = step(model, context_of(AUTOCAST))
    assert without.non_finite_logits() > 0
    clamp = InfClamp(["auto"]).attach(model)
    assert step(model, context_of(AUTOCAST)).non_finite_logits() == 0
    counted = {name: count for name, count in clamp.counted().items() if count}
    assert list(counted) == ["encoder.block.0.layer.1.dropout"]


@pytest.mark.parametrize("setting", [HALF, AUTOCAST], ids=lambda setting: setting.name)
def test_clamp_handles_overflow_in_functional_dropout(
    setting: Setting,
) -> None:
    """Layers of BART call dropout as a function, which has no hooks."""
    model = setting.convert(make("pegasus"))
    fc2 = model.model.decoder.layers[0].fc2
    fc2.register_forward_hook(lambda module, args, output: torch.full_like(output, 60000))
    assert step(model, context_of(setting)).non_finite_logits() > 0
    clamp = InfClamp(["auto"]).attach(model)
    assert step(model, context_of(setting)).non_finite_logits() == 0
    counted = {name: count for name, count in clamp.counted().items() if count}
    assert counted == {"model.decoder.layers.0.fc2": 2 * 7 * 32}
    clamp.reset_counts()
    assert step(model.eval(), context_of(setting)).non_finite_logits() == 0
    assert clamp.counts().sum() == 0  # 60000 is finite without dropout


def test_value_leaves_headroom_for_dropout_unlike_that_of_t5() -> None:
    written = torch.full((7,), torch.inf).half()
    t5s_own = torch.tensor(64504.0).half()
    clamped = InfClamp(["Identity"]).attach(layer := nn.Identity()) and layer(written)
    for p in (0.1, 0.5):
        assert (t5s_own.float() / (1 - p)).half().isinf()
        assert (clamped.float() / (1 - p)).half().isfinite().all()
    assert (clamped + clamped).isfinite().all()
    assert t5s_own == 64512


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_auto_with_checkpointed_layers_counts_each_overflow_once(kind: str) -> None:
    model = make(kind, 1e5 if kind == "t5" else 3e6)
    clamp = InfClamp(["auto"]).attach(model)
    plain = step(model, context_of(AUTOCAST))
    counts = clamp.counted()
    clamp.reset_counts()
    old_name = "gradient_checkpointing_enable"
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, old_name)
    enable({"use_reentrant": False})
    checkpointed = step(model, context_of(AUTOCAST))
    assert clamp.counted() == counts
    assert torch.equal(checkpointed.logits, plain.logits)
    for name, grad in checkpointed.gradients.items():
        assert torch.equal(grad, plain.gradients[name]), name


def test_auto_on_t5_selects_the_layers_that_write_to_the_residual_stream() -> None:
    names = InfClamp(["auto"]).attach(make("t5")).names
    block = "decoder.block.1.layer"
    for wanted in (
        f"{block}.0.SelfAttention.o",
        f"{block}.1.EncDecAttention.o",
        f"{block}.2.DenseReluDense.wo",
        f"{block}.2.dropout",
        f"{block}.2.layer_norm",
        f"{block}.2",
        "decoder.final_layer_norm",
    ):
        assert wanted in names
    for other in (f"{block}.0.SelfAttention.q", f"{block}.2.DenseReluDense.wi", "lm_head", block):
        assert other not in names


def test_named_modules_clamp_model_outputs_of_transformers() -> None:
    """The decoder returns a `ModelOutput` with hidden states in a tuple."""
    model = half(make("bart").eval())
    norm = model.model.decoder.layers[1].final_layer_norm
    norm.register_forward_hook(lambda module, args, output: output / 0)
    ids = torch.randint(3, 64, (2, 5))
    clamp = InfClamp(["model.decoder"]).attach(model)
    output = model.model(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True)
    assert output.last_hidden_state.abs().eq(32752).all()
    assert output.decoder_hidden_states[-1].abs().eq(32752).all()
    assert clamp.counted() == {"model.decoder": 2 * 2 * 5 * 32}
