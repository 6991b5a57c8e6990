"""Tables of the fused step: layouts and alignment of tensors, reuse of tables."""

import math

import pytest
import torch
import triton.language as tl

from lightning_mp.optim._adamw import tables as adamw_tables
from lightning_mp.optim._adamw.adamw_kernels import CHUNK, adamw_kernel
from lightning_mp.optim._adamw.foreach import AdamWOptions, foreach_adamw_step
from lightning_mp.optim._adamw.fused import fused_adamw_step
from lightning_mp.optim._adamw.tables import tables_for_capture, tables_of
from tests.optim.adamw_problems import (
    BF16,
    FP16,
    OPTIONS,
    Problem,
    disagreement,
    fresh,
    make_problem,
    off_by_one_element,
)

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize(("half", "write_back"), [(FP16, "kahan"), (BF16, "stochastic")])
def test_alignment_changes_no_bit(half, write_back):
    problem = fresh(half, half, write_back)
    aligned = problem.after(fused_adamw_step, write_back=write_back)
    odd = problem.map(off_by_one_element)
    assert all(t.data_ptr() % 16 for t in sum(odd.lists, []) if t.numel())
    fused_adamw_step(odd, AdamWOptions(**OPTIONS | {"write_back": write_back}))
    assert odd.is_same(aligned)


def test_one_misaligned_tensor_does_not_affect_the_others():
    problem = fresh()
    problem.grads[3] = off_by_one_element(problem.grads[3])
    with tables_of(problem.lists, problem.steps) as (table, _, _):
        assert table[adamw_tables._IS_ALIGNED].tolist() == [1, 1, 1, 0]


def test_tensors_of_any_layout_are_stepped_in_place():
    shape = (4, 6, 3, 5)
    layouts = [
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
        lambda t: torch.stack([t, t.flip(0)], dim=-1)[..., 0],  # gaps
        lambda t: torch.cat([t, t], dim=1)[:, :6],
    ]
    problem = make_problem([shape] * len(layouts), FP16, FP16)
    expected = problem.after(fused_adamw_step)
    alike = [[layout(t) for t, layout in zip(each, layouts, strict=True)] for each in problem.lists]
    shuffled = [
        [layouts[(i + row) % len(layouts)](t) for i, t in enumerate(each)]
        for row, each in enumerate(problem.lists)
    ]
    for lists in (alike, shuffled):
        assert not all(t.is_contiguous() for each in lists for t in each)
        laid_out = Problem.of(lists, problem.steps)
        fused_adamw_step(laid_out, AdamWOptions(**OPTIONS))
        assert laid_out.is_same(expected)


def test_dense_layouts_and_dimensions_of_one_need_no_copy():
    problem = make_problem([(4, 6, 3, 5), (8, 4, 1, 1), (7, 5)])
    lists = [
        [
            each[0].contiguous(memory_format=torch.channels_last),
            each[1].as_strided((8, 4, 1, 1), (4, 1, 1 + 3 * row, 4)),  # the same elements in order
            each[2].t().contiguous().t(),
        ]
        for row, each in enumerate(problem.lists)
    ]
    with tables_of(lists, problem.steps) as (table, _, _):
        assert table[:4].tolist() == [[t.data_ptr() for t in each] for each in lists]


def test_offsets_beyond_2_to_the_31_are_correct():
    """The table has the address of a tensor of 2^33 elements, of which only one chunk exists."""
    chunk = 2**33 // CHUNK.value - 1
    problem = make_problem([(CHUNK.value,)])
    expected = problem.after(fused_adamw_step)
    with tables_of(problem.lists, problem.steps) as (table, chunks, _):
        table = table.clone()
        table[:4] -= 4 * chunk * CHUNK.value
        table[6] = (chunk + 1) * CHUNK.value
        beta1, beta2 = OPTIONS["beta1"], OPTIONS["beta2"]
        adamw_kernel[(1,)](
            table, torch.tensor([[0, chunk]], dtype=torch.int32), None, OPTIONS["lr"], None, None,
            None, 1, 2**62, beta1, 1 - beta1, math.log(beta1), beta2, 1 - beta2, math.log(beta2),
            OPTIONS["eps"], OPTIONS["weight_decay"], 1.0, 1.0, tl.float32, tl.float32, False,
            "nearest", 1.0,
        )  # fmt: skip
    assert problem.is_same(expected)


def test_small_tensors_take_one_program_each():
    problem = make_problem([(n % 7,) for n in range(30)])
    with tables_of(problem.lists, problem.steps) as (_, chunks, _):
        assert len(chunks) == sum(p.numel() > 0 for p in problem.params)
    fused = problem.after(fused_adamw_step)
    assert disagreement(fused, problem.after(foreach_adamw_step)) < 1


def test_empty_batch_is_accepted():
    fused_adamw_step(Problem(), AdamWOptions(**OPTIONS))
    problem = make_problem([(0,), (3, 0)], FP16, FP16)
    fused_adamw_step(problem, AdamWOptions(**OPTIONS | {"clip_update_rms": 1.0}))


def test_table_is_rebuilt_only_if_an_address_changes():
    problem = fresh(FP16, FP16)

    def tables():
        with tables_of(problem.lists, problem.steps) as made:
            return made

    first = tables()
    assert all(mine is other for mine, other in zip(tables(), first, strict=True))
    grads = problem.grads
    problem.grads = [grad.clone() for grad in grads]
    moved = tables()
    assert moved.chunks is first.chunks
    assert moved.table[1].tolist() == [grad.data_ptr() for grad in problem.grads]
    problem.grads = grads
    assert tables().table is first.table
    problem.params[0] = problem.params[0].clone()
    assert tables().table[0].tolist() == [param.data_ptr() for param in problem.params]
    problem.steps[1] = problem.steps[1].clone()
    assert tables().table[5].tolist() == [step.data_ptr() for step in problem.steps]


def test_same_memory_with_another_shape_gets_another_table():
    memory = make_problem([(24,)])
    for shape in ((24,), (4, 6), (7,), (3, 7)):
        count = math.prod(shape)
        lists = [[each[0][:count].view(shape)] for each in memory.lists]
        with tables_of(lists, memory.steps) as (table, _, _):
            assert table[6].tolist() == [count]


def test_transposed_gradient_is_read_in_its_new_order():
    problem = make_problem([(9, 9)])
    expected = problem.copy()
    for grad in (problem.grads[0], problem.grads[0].t()):
        problem.grads[0], expected.grads[0] = (
            grad,
            grad.clone(memory_format=torch.contiguous_format),
        )
        for each in (problem, expected):
            fused_adamw_step(each, AdamWOptions(**OPTIONS))
    assert problem.is_same(expected)


def test_memory_of_tables_is_bounded():
    problem = fresh(shapes=[(5,)])
    kept = []
    for _ in range(100):
        problem.grads = [torch.randn(5)]
        kept.append(problem.grads)  # otherwise the next one might get the same address
        with tables_of(problem.lists, problem.steps):
            pass
    (template,) = adamw_tables._templates[problem.steps[0]].values()
    assert len(template.tables) == adamw_tables._MAX_TABLES
    count = len(adamw_tables._templates)
    del problem
    assert len(adamw_tables._templates) == count - 1


def test_capture_uses_existing_tables_and_keeps_them(monkeypatch):
    problem = fresh(FP16, FP16)
    assert tables_for_capture(problem.lists, problem.steps) is None
    with tables_of(problem.lists, problem.steps) as made:
        pass
    key = adamw_tables._key_of(problem.lists, problem.steps)
    # A capture runs on another stream.
    monkeypatch.setattr(adamw_tables, "_key_of", lambda *_: (key[0], 7, key[2]))
    found = tables_for_capture(problem.lists, problem.steps)
    assert all(mine is other for mine, other in zip(found, made, strict=True))
    assert any(kept.table is made.table for kept in adamw_tables._captured)
    problem.grads[0] = problem.grads[0].clone()
    assert tables_for_capture(problem.lists, problem.steps) is None
    problem.grads[0] = problem.grads[0].t().contiguous().t()
    with tables_of(problem.lists, problem.steps):
        assert tables_for_capture(problem.lists, problem.steps) is None  # needs a copy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.exp_avgs.pop(), r"lists of \[2, 2, 1, 2, 2\] tensors"),
        (lambda p: p.params.__setitem__(0, torch.zeros(3).double()), "torch.float64 weights"),
        (lambda p: p.grads.__setitem__(1, torch.zeros(4).half()), r"`grad\[1\]` in torch.float16"),
        (lambda p: p.exp_avg_sqs.__setitem__(0, torch.zeros(3).half()), r"`exp_avg_sq\[0\]` in"),
        (lambda p: p.exp_avgs.__setitem__(1, torch.zeros(5)), r"with shape \[5\]"),
        (lambda p: p.steps.__setitem__(1, torch.ones(1)), r"`step\[1\]` .* shape \[1\]"),
        (lambda p: p.steps.__setitem__(0, torch.ones((), device="meta")), "on meta"),
    ],
)
def test_tensors_that_the_kernel_would_misread_raise(change, said):
    problem = make_problem([(3,), (4,)])
    change(problem)
    with pytest.raises(ValueError, match=said):
        fused_adamw_step(problem, AdamWOptions(**OPTIONS))


def test_tensors_without_memory_raise():
    problem = make_problem([(3,)]).map(lambda t: t.to("meta"))
    problem.steps = [step.to("meta") for step in problem.steps]
    with pytest.raises(ValueError, match="without storage"):
        fused_adamw_step(problem, AdamWOptions(**OPTIONS))
