"""`ContrastiveRecall` against a reference in float64, with ties, candidates and identifiers."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mp.metrics import ContrastiveRecall, ZeroShotAccuracy
from tests.metrics.pairs import DTYPES, TOP_K, as_floats, compute_once, make_pairs
from tests.reference.retrieval import dense_recall

# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [True, False], ids=["cosine", "dot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recall_random_features_agree_with_float64(dtype: torch.dtype, normalize: bool) -> None:
    image, text, image_ids, text_ids = make_pairs(101, 387, 17)
    image, text = image.to(dtype), text.to(dtype)
    ours = compute_once(
        image, text, image_ids, text_ids, normalize=normalize, workspace_bytes=20_000
    )
    # Twice the tie tolerance in both directions bounds the rounding of scores.
    margin = 2e-14 if dtype == torch.float64 else 5e-6
    low, high = (
        dense_recall(
            image, text, image_ids, text_ids, normalize=normalize, top_k=TOP_K, margin=sign * margin
        )
        for sign in (-1, 1)
    )
    assert ours.keys() == high.keys()
    for name, value in ours.items():
        bounds = sorted([low[name], high[name]])
        assert bounds[0] * (1 - 1e-6) <= value <= bounds[1] * (1 + 1e-6), name
        assert bounds[1] - bounds[0] < 0.1, "the bracket says nothing"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 3), (1, 5, 2), (193, 193, 7), (64, 301, 33)])
def test_recall_grid_features_with_ties_equal_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    image, text, image_ids, text_ids = make_pairs(*sizes, grid=True)
    expected = dense_recall(image, text, image_ids, text_ids, normalize=False, top_k=TOP_K)
    ours = compute_once(
        image.to(dtype), text.to(dtype), image_ids, text_ids, normalize=False, workspace_bytes=9_000
    )
    assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_recall_does_not_depend_on_the_workspace() -> None:
    batch = make_pairs(65, 130, 16, grid=True)
    values = [
        compute_once(*batch, normalize=normalize, workspace_bytes=workspace_bytes)
        for normalize in (False, True)
        for workspace_bytes in (1_500, 9_000, 50_000, 2**26)
    ]
    assert values[0] == values[1] == values[2] == values[3]
    assert values[4] == values[5] == values[6] == values[7]
    assert values[0] != values[4]


def test_recall_without_ids_pairs_rows_across_batches() -> None:
    image, text, *_ = make_pairs(90, 90, 8)
    metric = ContrastiveRecall(top_k=[1, 3])
    for rows in torch.arange(90).split([50, 0, 39, 1]):
        metric.update(image[rows], text[rows])
    index = torch.arange(90)
    assert as_floats(metric.compute()) == compute_once(image, text, index, index, top_k=(1, 3))


def test_recall_does_not_depend_on_extreme_scales() -> None:
    batch = make_pairs(40, 80, 8)
    plain = compute_once(*batch)
    for scale in (1e30, 1e-30):  # squares overflow or underflow in fp32
        assert compute_once(batch[0] * scale, batch[1] * scale, *batch[2:]) == plain
    dot = compute_once(*batch, normalize=False)
    assert compute_once(batch[0] * 1e30, batch[1] * 1e30, *batch[2:], normalize=False) == dot
    assert dot != plain


def test_recall_of_float64_features_resolves_smaller_differences() -> None:
    # Text 1 prefers its own image by 1e-8: a tie in fp32, which costs a rank.
    image = torch.eye(2, dtype=torch.float64)
    text = torch.tensor([[1, 0], [1, 1 + 1e-8]], dtype=torch.float64)
    assert compute_once(image, text)["text_to_image_mean_rank"] == 1
    assert compute_once(image.float(), text.float())["text_to_image_mean_rank"] == 1.5


def test_recall_under_autocast_and_half_default_dtype_stays_fp32() -> None:
    batch = make_pairs(300, 300, 16)
    plain = compute_once(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_once(*batch) == plain
    torch.set_default_dtype(torch.float16)
    try:
        assert compute_once(*batch) == plain
    finally:
        torch.set_default_dtype(torch.float32)


def test_scores_use_no_tf32() -> None:
    found = set()

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
                found.add(torch.backends.cuda.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    zero_shot = ZeroShotAccuracy(num_classes=3)
    zero_shot.update_prompts(torch.eye(3), torch.arange(3))
    torch.set_float32_matmul_precision("high")
    try:
        with Products():
            compute_once(*make_pairs(3, 3, 4))
            zero_shot.update(torch.eye(3), torch.arange(3))
        assert found == {"ieee"}
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# ---- ties, NaN, queries without a match ---------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False], ids=["cosine", "dot"])
@pytest.mark.parametrize("width", [1, 33, 512])
@pytest.mark.parametrize("workspace_bytes", [50_000, 2**26])
@pytest.mark.slow
def test_recall_of_a_collapsed_model_is_zero(
    normalize: bool, width: int, workspace_bytes: int
) -> None:
    row = torch.randn(1, width, generator=torch.Generator().manual_seed(width))
    values = compute_once(
        row.repeat(97, 1),
        2 * row.repeat(97, 1),
        normalize=normalize,
        workspace_bytes=workspace_bytes,
    )
    assert values["image_to_text_recall@10"] == values["text_to_image_recall@10"] == 0
    assert values["image_to_text_mean_rank"] == values["text_to_image_median_rank"] == 97


def test_recall_orthogonal_pairs_are_perfect() -> None:
    values = compute_once(torch.eye(6), torch.eye(6), top_k=(1,))
    for direction in ("image_to_text", "text_to_image"):
        assert values.pop(f"{direction}_recall@1") == 1
        assert values.pop(f"{direction}_median_rank") == 1
        assert values.pop(f"{direction}_mean_rank") == 1
        assert values.pop(f"{direction}_queries") == 6
    assert not values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("normalize", [True, False], ids=["cosine", "dot"])
def test_recall_non_finite_row_is_ahead_as_candidate_and_no_hit_as_query(
    bad: float, normalize: bool
) -> None:
    image, text = torch.eye(6), torch.eye(6)
    image[2, 4] = bad
    values = compute_once(image, text, top_k=(1, 2, 50), normalize=normalize)
    # The NaN image takes rank 1 from all texts, and text 2 loses its only match.
    assert values["text_to_image_recall@1"] == 0
    assert values["text_to_image_recall@2"] == pytest.approx(5 / 6)
    assert values["text_to_image_recall@50"] == pytest.approx(5 / 6)
    assert values["text_to_image_mean_rank"] == pytest.approx((5 * 2 + 7) / 6)
    assert values["image_to_text_recall@1"] == pytest.approx(5 / 6)
    assert values["image_to_text_recall@50"] == pytest.approx(5 / 6)
    assert values["image_to_text_mean_rank"] == pytest.approx((5 * 1 + 7) / 6)


def test_recall_with_a_nan_match_uses_the_finite_match() -> None:
    text = torch.tensor([[1.0, 0], [float("nan"), 0], [0, 1]])
    values = compute_once(torch.eye(2), text, torch.tensor([0, 1]), torch.tensor([0, 0, 1]))
    assert values["image_to_text_mean_rank"] == 1.5  # image 1 has the NaN text ahead
    assert values["text_to_image_mean_rank"] == pytest.approx((1 + 3 + 1) / 3)


def test_recall_zero_feature_ties_with_all() -> None:
    values = compute_once(torch.tensor([[0.0, 0], [1, 0]]), torch.eye(2))
    assert values["image_to_text_mean_rank"] == 2  # image 1 is closest to the other's text
    assert values["text_to_image_mean_rank"] == 2


def test_recall_ignores_unmatched_queries_and_warns_once() -> None:
    image, text, image_ids, text_ids = make_pairs(30, 60, 8, grid=True)
    text_ids[text_ids == text_ids[0]] = -1
    metric = ContrastiveRecall(normalize=False)
    metric.update(image, text, image_ids, text_ids)
    n_orphans = int((text_ids == -1).sum())
    with pytest.warns(
        UserWarning, match=f"1 images without a text of equal id and {n_orphans} texts"
    ):
        values = as_floats(metric.compute())
    assert values == pytest.approx(
        dense_recall(image, text, image_ids, text_ids, normalize=False, top_k=TOP_K), rel=1e-6
    )
    assert values["image_to_text_queries"] == 29
    assert values["text_to_image_queries"] == 60 - n_orphans
    metric.update(image[:1], text[:1], image_ids[:1], text_ids[:1])
    metric.compute()  # warnings are errors here


def test_recall_without_common_ids_raises() -> None:
    metric = ContrastiveRecall()
    metric.update(torch.eye(3), torch.eye(3), torch.arange(3), torch.arange(3) + 3)
    with pytest.raises(ValueError, match="3 images and 3 texts without any equal ids"):
        metric.compute()


# ---- memory -------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.n_bytes = max(self.n_bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.slow
@pytest.mark.parametrize("n", [400, 800])
@pytest.mark.parametrize("normalize", [True, False], ids=["cosine", "dot"])
def test_largest_tensor_of_compute_is_linear(n: int, normalize: bool) -> None:
    workspace_bytes = 80_000
    metric = ContrastiveRecall(workspace_bytes=workspace_bytes, normalize=normalize)
    metric.update(*make_pairs(n, 2 * n, 8))
    with LargestTensor() as largest:
        metric.compute()
    # The concatenated texts are the largest; the matrix would be 4 n * 2 n = 1.3 MB at n = 400.
    assert largest.n_bytes <= max(workspace_bytes, 2 * n * 8 * 4) < 4 * n * 2 * n / 10


@pytest.mark.slow
def test_live_tiles_of_compute_fit_the_workspace() -> None:
    workspace_bytes = 2**20
    batch = make_pairs(900, 900, 64)
    metric = ContrastiveRecall(workspace_bytes=workspace_bytes)
    metric.update(*batch)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        metric.compute()
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    gathered = sum(t.nbytes for t in batch)
    per_query = 900 * 2 * (4 + 1 + 8) + 900 * 8 * 6
    assert workspace_bytes / 3 < peak - gathered - per_query <= workspace_bytes


def test_state_keeps_the_dtype_and_copies_features() -> None:
    image = torch.eye(4, dtype=torch.bfloat16, requires_grad=True)
    text = torch.eye(4, dtype=torch.bfloat16)
    metric = ContrastiveRecall(top_k=(1,))
    metric.update(image, text)
    text.zero_()
    assert metric.text_features[0].dtype == torch.bfloat16
    assert not metric.image_features[0].requires_grad
    assert float(metric.compute()["image_to_text_recall@1"]) == 1


# ---- torchmetrics' interface --------------------------------------------------------------------


@pytest.mark.parametrize("with_ids", [True, False], ids=["ids", "positions"])
def test_forward_returns_the_batch_and_accumulates(with_ids: bool) -> None:
    first, second = make_pairs(20, 20, 6, seed=1), make_pairs(25, 25, 6, seed=2)
    if with_ids:
        second[2].add_(1000)
        second[3].add_(1000)
    else:
        first, second = first[:2], second[:2]
    metric = ContrastiveRecall()
    assert as_floats(metric(*first)) == compute_once(*first)
    assert as_floats(metric(*second)) == compute_once(*second)
    both = [torch.cat(pair) for pair in zip(first, second, strict=True)]
    assert as_floats(metric.compute()) == compute_once(*both)
    metric.reset()
    metric.update(*second)
    assert as_floats(metric.compute()) == compute_once(*second)


def test_metric_copies_and_moves_keep_the_value() -> None:
    metric = ContrastiveRecall(top_k=(2,), normalize=False, workspace_bytes=5_000)
    metric.update(*make_pairs(30, 50, 6))
    expected = as_floats(metric.clone().compute())
    assert as_floats(pickle.loads(pickle.dumps(metric)).compute()) == expected
    assert as_floats(metric.to("cpu").compute()) == expected
    assert not metric.state_dict()
    metric.persistent(True)
    loaded = ContrastiveRecall(top_k=(2,), normalize=False)
    loaded.load_state_dict(metric.state_dict(), strict=False)
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert as_floats(loaded.compute()) == expected


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [(), [0], [1, -5], [2.0], ["1"], [True], 5, "15"])
def test_constructor_bad_top_k_raises(top_k: object) -> None:
    with pytest.raises(ValueError, match="`top_k` must be a non-empty list of integers"):
        ContrastiveRecall(top_k=top_k)


@pytest.mark.parametrize("options", [{"normalize": "yes"}, {"workspace_bytes": 0}])
def test_constructor_bad_option_raises(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ContrastiveRecall(**options)


I5, I6 = torch.arange(5), torch.arange(6)
BAD_BATCHES = {
    "one_dimension": ((torch.ones(5), torch.ones(5, 4)), r"`image_features` of shape \(5,\)"),
    "three_dimensions": ((torch.eye(4), torch.ones(4, 4, 1)), "`text_features` of shape"),
    "no_width": ((torch.ones(5, 0), torch.ones(5, 0)), r"accepts \(n, D\)"),
    "integers": ((torch.ones(5, 4).long(), torch.ones(5, 4)), "dtype torch.int64"),
    "list": (([[1.0]], torch.ones(1, 1)), "`image_features` as list"),
    "widths": ((torch.ones(5, 4), torch.ones(5, 3)), "width 4, .* width 3"),
    "mixed_dtypes": ((torch.ones(5, 4), torch.ones(5, 4).half()), "float32 .* torch.float16"),
    "one_id": ((torch.ones(5, 4), torch.ones(5, 4), I5), "`image_ids` without `text_ids`"),
    "other_id": ((torch.ones(5, 4), torch.ones(5, 4), None, I5), "`text_ids` without `image_ids`"),
    "id_length": ((torch.ones(5, 4), torch.ones(6, 4), I5, I5), r"`text_ids` of shape \(5,\)"),
    "id_rank": ((torch.ones(5, 4), torch.ones(6, 4), I5[None], I6), r"`image_ids` of shape \(1, 5"),
    "id_dtype": ((torch.ones(5, 4), torch.ones(6, 4), I5.float(), I6), "dtype torch.float32"),
    "id_list": ((torch.ones(5, 4), torch.ones(6, 4), I5, [1] * 6), "`text_ids` as list"),
    "later_width": ((torch.ones(5, 3), torch.ones(5, 3), I5, I5), "width 3 .* after width 4"),
    "later_dtype": ((torch.eye(4).half(), torch.eye(4).half()), "float16 after width 4"),
    "later_without_ids": ((torch.eye(4), torch.eye(4)), "without ids after an update with ids"),
}


@pytest.mark.parametrize("call", ["update", "forward"])
@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_bad_batch_raises_and_leaves_the_state(
    call: str, batch: tuple[object, ...], message: str
) -> None:
    metric = ContrastiveRecall()
    good = make_pairs(20, 30, 4)
    metric.update(*good)
    with pytest.raises(ValueError, match=message):
        getattr(metric, call)(*batch)
    assert [len(state) for state in metric.metric_state.values()] == [1, 1, 1, 1]
    metric.update(torch.ones(0, 4), torch.ones(0, 4), I5[:0], I5[:0])
    assert as_floats(metric.compute()) == compute_once(*good)


def test_mixed_use_of_ids_and_unequal_lengths_raise() -> None:
    metric = ContrastiveRecall()
    metric.update(torch.eye(4), torch.eye(4))
    for call in (metric.update, metric):
        with pytest.raises(ValueError, match="5 images and 6 texts without ids"):
            call(torch.ones(5, 4), torch.ones(6, 4))
        with pytest.raises(ValueError, match="with ids after an update without ids"):
            call(torch.eye(4), torch.eye(4), torch.arange(4), torch.arange(4))
    assert float(metric.compute()["text_to_image_queries"]) == 4


def test_forward_that_cannot_compute_leaves_the_state() -> None:
    metric = ContrastiveRecall()
    good = make_pairs(20, 30, 4)
    metric.update(*good)
    with pytest.raises(ValueError, match="without any equal ids"):
        metric(torch.eye(4), torch.eye(4), torch.arange(4), torch.arange(4) + 9)
    assert as_floats(metric.compute()) == compute_once(*good)


def test_compute_before_update_raises() -> None:
    metric = ContrastiveRecall()
    with (
        pytest.warns(UserWarning, match="before the ``update`` method"),
        pytest.raises(RuntimeError, match="with 0 images and 0 texts"),
    ):
        metric.compute()
    metric.update(torch.eye(3), torch.ones(0, 3), torch.arange(3), torch.arange(0))
    with pytest.raises(RuntimeError, match="with 3 images and 0 texts"):
        metric.compute()
    metric.reset()
    metric.update(torch.ones(0, 3), torch.eye(3), torch.arange(0), torch.arange(3))
    with pytest.raises(RuntimeError, match="with 0 images and 3 texts"):
        metric.compute()


# ---- several ranks ------------------------------------------------------------------------------
