"""The TypeError of a constructor names an unknown argument and suggests the closest one."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lightning_mp
from lightning_mp._arguments import explains_arguments

PARAMETERS = [nn.Parameter(torch.zeros(2))]
# Class -> required arguments, a misspelt keyword, and the correct keyword.
MISSPELT: dict[str, tuple[list[Any], str, str]] = {
    "ActivationRangeMonitor": ([], "min_headroom_bit", "min_headroom_bits"),
    "AdamStateMonitor": ([], "max_update_rsm", "max_update_rms"),
    "BalancedAMP": ([], "lossscale", "loss_scale"),
    "ClipLoss": ([], "local_los", "local_loss"),
    "ContrastiveLoss": ([], "tile_dtyp", "tile_dtype"),
    "ContrastiveRecall": ([], "topk", "top_k"),
    "FSDPBalancedAMP": ([], "fp32_module", "fp32_modules"),
    "GradientCache": ([4], "replay_tolerence", "replay_tolerance"),
    "GradientUnderflowMonitor": ([], "warn_shares", "warn_share"),
    "InfCLModelParallelStrategy": ([], "prefech", "prefetch"),
    "InfCLStrategy": ([], "find_unused_paramters", "find_unused_parameters"),
    "InfClamp": ([], "gradients", "gradient"),
    "InstabilityMonitor": ([], "repeat_after_step", "repeat_after_steps"),
    "InstabilityReport": ([], "file_name", "filename"),
    "LossScaleConfig": ([], "init_scal", "init_scale"),
    "LossScaleMonitor": ([], "window_step", "window_steps"),
    "MatryoshkaLoss": ([], "weigths", "weights"),
    "ModelParallelBalancedAMP": ([], "reduce_dtyp", "reduce_dtype"),
    "NonFiniteLocator": ([], "max_replay", "max_replays"),
    "OpPolicy": ([], "fp32_op", "fp32_ops"),
    "ParameterMonitor": ([], "max_untraind", "max_untrained"),
    "PrecisionPreflight": ([], "step", "steps"),
    "PureFP16": ([], "writeback", "write_back"),
    "RepresentationMonitor": ([], "module", "modules"),
    "SafeAdamW": ([PARAMETERS], "weight_decya", "weight_decay"),
    "SigLipLoss": ([], "chunk_siz", "chunk_size"),
    "SigmoidContrastiveLoss": ([], "exchang", "exchange"),
    "SpikeGuard": ([], "acton", "action"),
    "TensorCollector": ([], "reduction", "reductions"),
    "ZeroShotAccuracy": ([], "num_class", "num_classes"),
}
# Their constructors are not called by users, or only forward arguments.
OTHERS = {
    "Alarm",
    "EpsilonReport",
    "InstabilityError",
    "InstabilityWarning",
    "LightningMPCLI",
    "LossStatistics",
}


def test_every_public_class_is_listed_here() -> None:
    public = {name: getattr(lightning_mp, name) for name in lightning_mp.__all__}
    assert {n for n, value in public.items() if isinstance(value, type)} == {*MISSPELT, *OTHERS}


@pytest.mark.parametrize("name", MISSPELT)
def test_error_for_misspelt_keyword_suggests_the_argument(name: str) -> None:
    needed, wrong, right = MISSPELT[name]
    message = (
        rf"^Passed `{name}\(.*{wrong}=1\)`\. It takes no `{wrong}`\. Did you mean `{right}`\?$"
    )
    with pytest.raises(TypeError, match=message):
        getattr(lightning_mp, name)(*needed, **{wrong: 1})


@pytest.mark.parametrize("name", MISSPELT)
def test_error_for_positional_argument_shows_its_value(name: str) -> None:
    cls = getattr(lightning_mp, name)
    kinds = [p.kind for p in list(inspect.signature(cls).parameters.values())]
    places = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    message = "'surplus' must be passed by name. The names are `"
    if inspect.Parameter.KEYWORD_ONLY not in kinds:  # open_clip's own signatures
        message = f"It takes {places} arguments: `"
    with pytest.raises(TypeError, match=message):
        cls(*[PARAMETERS] * places, "surplus")


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "said"),
    [
        ("BalancedAMP", ["bf16"], {}, "Did you mean `half='bf16'`?"),
        ("BalancedAMP", [], {"precision": "bf16"}, "Did you mean `half='bf16'`?"),
        ("SpikeGuard", ["skip"], {}, "Did you mean `action='skip'`?"),
        ("InfClamp", [["auto"], "zero"], {}, "Did you mean `gradient='zero'`?"),
        ("ContrastiveLoss", [], {"temperature": 0.1}, "Pass `1 / temperature` as `logit_scale`"),
        (
            "ContrastiveLoss",
            [],
            {"color": 0.1},
            "It takes `process_group`, `workspace_bytes`",
        ),
        ("SafeAdamW", [], {}, "`params` is missing. Pass `params=...`."),
        ("InfCLStrategy", [], {"module": 1}, "It takes no `module`"),
        ("ContrastiveRecall", [], {"k": 5}, "It takes no `k`. Did you mean `top_k`?"),
        ("AdamStateMonitor", [], {"every": 10}, "Did you mean `every_n_steps`?"),
        ("SafeAdamW", [PARAMETERS], {"learning_rate": 0.1}, "Pass it as `lr`."),
    ],
)
def test_error_message_contains_the_hint(
    name: str, args: list[Any], kwargs: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(lightning_mp, name)(*args, **kwargs)
    assert said in str(caught.value)


def test_argument_that_kwargs_accept_is_not_refused() -> None:
    strategy = lightning_mp.InfCLStrategy(find_unused_parameters=True, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert not lightning_mp.ContrastiveRecall(sync_on_compute=False).sync_on_compute


def test_unknown_kwargs_are_left_to_the_function_that_receives_them() -> None:
    with pytest.raises(ValueError, match="Unexpected keyword arguments: `compute_on_disk`"):
        lightning_mp.ContrastiveRecall(compute_on_disk=True)


def test_long_values_are_abbreviated() -> None:
    with pytest.raises(TypeError) as caught:
        lightning_mp.BalancedAMP(model=nn.Sequential(*[nn.Linear(3, 3)] * 100))  # type: ignore[call-arg]
    assert len(str(caught.value)) < 400


class Mine(lightning_mp.BalancedAMP):
    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(half="bf16", **kwargs)
        self.name = name


def test_subclass_may_add_arguments() -> None:
    assert Mine("a").name == "a"
    with pytest.raises(TypeError, match=r"^Passed `BalancedAMP\(half='bf16', haf=1\)`"):
        Mine("a", haf=1)


def test_error_names_the_subclass_without_a_constructor() -> None:
    class Ours(lightning_mp.SpikeGuard):
        pass

    with pytest.raises(TypeError, match=r"^Passed `Ours\('skip'\)`"):
        Ours("skip")  # type: ignore[misc]


def test_signature_copy_and_pickle_are_unchanged() -> None:
    @explains_arguments()
    class Plain:
        def __init__(self, a: int, *, b: str = "x") -> None:
            self.a, self.b = a, b

    assert str(inspect.signature(Plain)) == "(a: int, *, b: str = 'x') -> None"
    assert vars(copy.deepcopy(Plain(1, b="y"))) == {"a": 1, "b": "y"}
    config = lightning_mp.LossScaleConfig(init_scale=4.0)
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == config
    loss = lightning_mp.ContrastiveLoss(backend="torch")
    assert pickle.loads(pickle.dumps(loss)).backend == copy.deepcopy(loss).backend == "torch"
