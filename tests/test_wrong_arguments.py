"""Every argument of every public constructor refuses wrong values."""

import collections.abc
import inspect
import math
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from torch import nn

import lightning_mp
from lightning_mp._arguments import _TABLES
from tests.test_arguments import MISSPELT

PARAMETERS = [nn.Parameter(torch.zeros(2))]
# Required arguments of a constructor, and the values of its other arguments.
NEEDED: dict[str, dict[str, Any]] = {
    "GradientCache": {"micro_batch_size": 4},
    "MatryoshkaLoss": {"widths": [8]},
    "SafeAdamW": {"params": PARAMETERS},
    "ZeroShotAccuracy": {"num_classes": 3},
}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 1.5, -1.0, 10**9),
    *(math.nan, math.inf, -math.inf, 1j, np.float32("nan"), np.int64(-1)),
    *("", "False", "auto", "nonsense", "1", b"auto"),
    *([], ["nonsense"], [""], [1], [None], [-1.0, math.nan], {}, {"norm"}, {"a": 1}),
    *(torch.tensor(1.0), torch.tensor([True, False]), object(), int, len, Path("a/b")),
    *(torch.float16, nn.Linear(1, 1)),
    *(10**400, -(10**400), 2**63, bytearray(b"a"), memoryview(b"a"), [10**400]),
]
SIGNED = {"margin"}  # arguments that accept every number
ARGUMENTS = [
    (name, parameter.name)
    for name in MISSPELT
    for parameter in inspect.signature(getattr(lightning_mp, name)).parameters.values()
    if parameter.kind is not parameter.VAR_KEYWORD
]
every_argument = pytest.mark.parametrize(
    ("name", "argument"), ARGUMENTS, ids=["-".join(each) for each in ARGUMENTS]
)


def is_of_type(annotation: Any, value: Any) -> bool:
    """Return whether a value has the annotated type, whether or not it is in range."""
    origin, inner = get_origin(annotation), get_args(annotation)
    is_bool = isinstance(value, bool)
    if origin in (typing.Union, types.UnionType):
        return any(is_of_type(each, value) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if annotation is float:
        is_number = isinstance(value, int | float | np.integer | np.floating) and not is_bool
        return is_number and not math.isnan(value)
    if annotation is int:
        return isinstance(value, int | np.integer) and not is_bool
    if origin in (collections.abc.Sequence, tuple):
        is_list = isinstance(value, list | tuple)
        return is_list and all(is_of_type(inner[0], each) and each != "" for each in value)
    if origin is collections.abc.Mapping:
        return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is collections.abc.Iterable:  # parameters, or groups of them
        return isinstance(value, list) and bool(value) and value is PARAMETERS
    return isinstance(value, annotation or type(None))


def must_be_refused(annotation: Any, name: str, value: Any) -> bool:
    if name.endswith("path") and isinstance(value, Path):
        return False
    is_number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    is_negative = is_number and value < 0 and name not in SIGNED
    is_huge = is_number and isinstance(value, int) and value > sys.float_info.max
    return is_huge or is_negative or not is_of_type(annotation, value)


@pytest.mark.filterwarnings("ignore:Passed `ClipLoss.gather_with_grad=False")
@every_argument
def test_error_for_wrong_value_has_class_argument_value_and_accepted_values(
    name: str, argument: str
) -> None:
    cls = getattr(lightning_mp, name)
    annotation = typing.get_type_hints(cls.__init__)[argument]
    for value in VALUES:
        given = {**NEEDED.get(name, {}), argument: value}
        try:
            cls(**given)
        except ValueError as error:
            said = str(error)
            assert said.startswith(f"Passed `{name}("), said
            # Long values are abbreviated, and a NumPy number may have been converted.
            plain = value.item() if isinstance(value, np.generic) else value
            shown = {" ".join(repr(each).split())[:12] for each in (value, plain)}
            shown |= {"'...'"} if argument == "alert" else set()  # a URL may hold a token
            assert any(f"{argument}={each}" in said for each in shown), said
            accepted, _, fix = said.partition(")`")[2].partition(". ")[2].partition(". ")
            assert len(accepted) > 10, said
            assert fix, said
        else:
            assert not must_be_refused(annotation, argument, value), f"{argument}={value!r} passed"


@every_argument
def test_default_is_accepted_as_a_keyword(name: str, argument: str) -> None:
    cls = getattr(lightning_mp, name)
    default = inspect.signature(cls).parameters[argument].default
    if default is not inspect.Parameter.empty:
        cls(**{**NEEDED.get(name, {}), argument: default})


def test_value_that_is_not_checked_would_be_detected() -> None:
    class Lax:
        def __init__(self, autotune: bool, names: collections.abc.Sequence[str]) -> None: ...

    hints = typing.get_type_hints(Lax.__init__)
    assert must_be_refused(hints["autotune"], "autotune", "False")
    assert must_be_refused(hints["names"], "names", "nonsense")
    assert must_be_refused(float | None, "tolerance", math.nan)
    assert must_be_refused(int, "count", -1)
    assert not must_be_refused(float, "margin", -1.0)
    assert not must_be_refused(Literal["auto"] | float, "epsilon", "auto")


@pytest.mark.parametrize(
    ("name", "arguments", "types"),
    [
        ("LossScaleConfig", {"growth_interval": np.int64(5)}, {int}),
        ("LossScaleConfig", {"init_scale": np.float32(1024)}, {float}),
        ("SpikeGuard", {"z_threshold": np.float64(5)}, {float}),
        ("ContrastiveRecall", {"top_k": [np.int64(1), 5]}, {int}),
        ("ContrastiveLoss", {"label_smoothing": np.float16(0.5)}, {float}),
    ],
)
def test_numpy_numbers_are_converted(
    name: str, arguments: dict[str, Any], types: set[type]
) -> None:
    """`torch.load(weights_only=True)` would refuse them as arbitrary objects."""
    made, (argument,) = getattr(lightning_mp, name)(**arguments), arguments
    found = getattr(made, argument)
    values, given = (
        list(each) if argument == "top_k" else [each] for each in (found, arguments[argument])
    )
    assert {type(value) for value in values} == types
    assert values == given


@pytest.mark.parametrize("kind", [lightning_mp.InstabilityReport, lightning_mp.TensorCollector])
@pytest.mark.parametrize("home", [Path("~"), "~"], ids=["path", "string"])
def test_home_folder_of_a_path_is_expanded(kind: Any, home: Any) -> None:
    """As in `ModelCheckpoint`: YAML files do not expand it."""
    assert kind(dirpath=home).dirpath == str(Path.home())


@pytest.mark.parametrize("name", MISSPELT)
def test_every_check_names_an_argument(name: str) -> None:
    for base in getattr(lightning_mp, name).__mro__:
        if base in _TABLES:
            known = {
                n for each in base.__mro__ for n in inspect.signature(each.__init__).parameters
            }
            assert set(_TABLES[base].checks) <= known


class Ours(lightning_mp.SpikeGuard):
    """Inherits the arguments of its base class."""


class Passing(lightning_mp.SpikeGuard):
    """Forwards its arguments."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Choosing(lightning_mp.SpikeGuard):
    """Sets `patience` itself, so that its users cannot."""

    def __init__(self, name: str) -> None:
        super().__init__(patience=0)


@pytest.mark.parametrize(
    ("make", "called"),
    [
        (lambda: Ours(patience=0), "Ours"),
        (lambda: Ours(repeat_after_steps=0), "Ours"),
        (lambda: Passing("a", patience=0), "Passing"),
        (lambda: Choosing("a"), "SpikeGuard"),
    ],
)
def test_error_names_the_class_that_was_called(make: Any, called: str) -> None:
    with pytest.raises(ValueError, match=rf"^Passed `{called}\("):
        make()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "BalancedAMP",
            {"half": "fp8"},
            "one of 'fp16', 'bf16'. Leave it out for the default, 'fp",
        ),
        ("BalancedAMP", {"fp32_modules": "norm"}, "a list of names. Pass `fp32_modules=['norm']`."),
        ("BalancedAMP", {"adam_epsilon": 0}, "'auto', 'keep' or a finite number above 0."),
        ("BalancedAMP", {"device": "gpu"}, "'auto' or a type without an index"),
        ("ContrastiveLoss", {"autotune": "False"}, "True or False. Leave it out for the default"),
        ("ContrastiveLoss", {"label_smoothing": 2}, "a number from 0 to 1."),
        ("ContrastiveLoss", {"process_group": -100}, "a `ProcessGroup` or None. Ranks outside"),
        ("GradientCache", {"replay_tolerance": math.nan}, "a number of at least 0 or None."),
        ("GradientCache", {"micro_batch_size": 0}, "'auto' or an integer of at least 1."),
        (
            "InfCLStrategy",
            {"roles": {"x": "hole"}},
            "a mapping of names to roles or None. 'hole' is",
        ),
        ("InfClamp", {"value": 1e9}, "a number above 0 and at most 65504."),
        ("SafeAdamW", {"betas": (0.9, 1.0)}, "a pair of numbers of at least 0 and below 1."),
        ("SafeAdamW", {"fused": "yes"}, "True, False or None."),
        ("SpikeGuard", {"dirpath": 3}, "a path or None."),
    ],
)
def test_error_describes_accepted_values(name: str, given: dict[str, Any], said: str) -> None:
    ((argument, value),) = given.items()
    with pytest.raises(ValueError, match=rf"^Passed `{name}\({argument}=") as caught:
        getattr(lightning_mp, name)(**{**NEEDED.get(name, {}), **given})
    assert f"`{argument}` must be {said}" in str(caught.value)
    assert repr(value) in str(caught.value)
