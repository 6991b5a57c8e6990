"""AdamW over many tensors in one launch: unscale, decay, moments, update and write-back at once.

Shapes:
    T: tensors. C: chunks of all tensors together. BLOCK: elements that a program holds at a time.

A program processes one chunk of one tensor: it looks up the addresses in `table` and reads and
writes each element once. The formulas are those of `foreach`. With clipping, `rms_kernel` runs
first and stores partial sums, which every program adds in the same order. There are no atomics, so
the same input gives the same bits.

Addresses are integers without alignment information for Triton. Whole blocks of tensors that the
host found aligned to 16 bytes are read in vectors; other elements are read one by one under a mask.
Every thread holds four elements of a block: 16 bytes in fp32, 8 bytes in half precision. With eight
elements, fp32 and half vectors would have different layouts and values would have to pass through
shared memory.
"""

import triton
import triton.language as tl

from lightning_mp.numerics.split_kernels import join_block, residual_of_block
from lightning_mp.optim._adamw.foreach import ATAN2_A, ATAN2_B

__all__ = ["BLOCK", "CHUNK", "MAX_PARTS", "NUM_WARPS", "ROWS", "adamw_kernel", "rms_kernel"]

ROWS = (
    "param", "grad", "exp_avg", "exp_avg_sq", "residual", "step",
    "size", "is_aligned", "first_quad", "first_part", "num_parts",
)  # fmt: skip
"""Rows of `table`, int64 of shape (len(ROWS), T). The rows up to "step" hold addresses."""
NUM_WARPS = 8
BLOCK = tl.constexpr(4 * 32 * NUM_WARPS)
# With the size of a whole block, Triton would give masked blocks the same layout, in which one
# thread holds neighboring elements.
MASKED_BLOCK = tl.constexpr(BLOCK.value // 2)
CHUNK = tl.constexpr(4096)
MAX_PARTS = tl.constexpr(1024)

_GRAD, _EXP_AVG, _EXP_AVG_SQ = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_RESIDUAL, _STEP, _SIZE, _IS_ALIGNED = (tl.constexpr(row) for row in range(4, 8))
_FIRST_QUAD, _FIRST_PART, _NUM_PARTS = (tl.constexpr(row) for row in range(8, 11))
_ATAN2_A, _ATAN2_B = tl.constexpr(ATAN2_A), tl.constexpr(ATAN2_B)
_HALF_PI = tl.constexpr(1.5707963267948966)
_INF = tl.constexpr(float("inf"))


# Triton would recompile for numbers equal to 1 or divisible by 16 and for unaligned addresses.
@triton.jit(do_not_specialize=["num_tensors", "seed", "lr_at", "grad_scale", "found_inf"])
def adamw_kernel(
    table,
    chunks,
    partials,
    lr,
    lr_at,
    grad_scale,
    found_inf,
    num_tensors,
    seed,
    beta1,
    weight1,
    log_beta1,
    beta2,
    weight2,
    log_beta2,
    eps,
    weight_decay,
    clip,
    sign,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    IS_ATAN2: tl.constexpr,
    WRITE_BACK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Step one chunk of one tensor unless `found_inf` is nonzero.

    Args:
        table: Addresses and sizes of the tensors, see `ROWS`.
        chunks: int32 of shape (C, 2): tensor index and chunk index.
        partials: Partial sums of `rms_kernel`, or `None` without clipping.
        lr: Learning rate as a number.
        lr_at: Learning rate as one element on the device, or `None` to use `lr`.
        num_tensors: T.
        seed: Key of the noise of "stochastic".
        weight1, weight2: `1 - beta1` and `1 - beta2`, which lose digits when computed in fp32.
        log_beta1, log_beta2: Natural logarithms of `beta1` and `beta2`.
        sign: -1 to maximize, else 1.
        PARAM, GRAD: Dtypes of weights and gradients.
        UNIT: Unit of the residuals.

    The other arguments are those of `AdamWOptions`.
    """
    if _is_clean(found_inf):
        of_tensor = table + tl.load(chunks + 2 * tl.program_id(0))
        start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
        step = tl.load(_of(tl.load(of_tensor + _STEP * num_tensors), tl.float32))
        size = tl.load(of_tensor + _SIZE * num_tensors)

        rate = lr if lr_at is None else tl.load(lr_at).to(tl.float32)
        decay = 1 - rate * weight_decay
        if partials is not None:
            first = tl.load(of_tensor + _FIRST_PART * num_tensors)
            part = tl.arange(0, MAX_PARTS)
            has_part = part < tl.load(of_tensor + _NUM_PARTS * num_tensors)
            parts = tl.load(partials + first + part, mask=has_part, other=0.0)
            excess = tl.sqrt(tl.sum(parts, axis=0) / size.to(tl.float32)) / clip
            rate = tl.where(excess <= 1, rate, rate / excess)  # NaN stays
        unbias1 = 1 / _correction(step, log_beta1)
        unbias_root = 1 / tl.sqrt(_correction(step, log_beta2))
        unscale = _unscale(grad_scale, sign)

        is_aligned = tl.load(of_tensor + _IS_ALIGNED * num_tensors) != 0
        count = tl.minimum(size - start, CHUNK).to(tl.int32)
        whole = tl.where(is_aligned, count // BLOCK * BLOCK, 0)
        quad = tl.load(of_tensor + _FIRST_QUAD * num_tensors) + start // 4

        param = tl.load(of_tensor)
        grad = tl.load(of_tensor + _GRAD * num_tensors)
        exp_avg = tl.load(of_tensor + _EXP_AVG * num_tensors)
        exp_avg_sq = tl.load(of_tensor + _EXP_AVG_SQ * num_tensors)
        residual = param  # never read without residuals
        if WRITE_BACK == "kahan":
            residual = tl.load(of_tensor + _RESIDUAL * num_tensors)

        # The masked loop needs pointers of its own, because a hint applies to all uses of a value.
        param_at = tl.multiple_of(_of(param, PARAM) + start, 16)
        grad_at = tl.multiple_of(_of(grad, GRAD) + start, 16)
        exp_avg_at = tl.multiple_of(_of(exp_avg, tl.float32) + start, 16)
        exp_avg_sq_at = tl.multiple_of(_of(exp_avg_sq, tl.float32) + start, 16)
        residual_at = tl.multiple_of(_of(residual, PARAM) + start, 16)
        for at in range(0, whole, BLOCK):
            _step_block(
                param_at, grad_at, exp_avg_at, exp_avg_sq_at, residual_at, at, None, quad, seed,
                rate, decay, unscale, unbias1, unbias_root, beta1, weight1, beta2, weight2, eps,
                IS_ATAN2, WRITE_BACK, UNIT,
            )  # fmt: skip
        for at in range(whole, count, MASKED_BLOCK):
            _step_block(
                _of(param, PARAM) + start,
                _of(grad, GRAD) + start,
                _of(exp_avg, tl.float32) + start,
                _of(exp_avg_sq, tl.float32) + start,
                _of(residual, PARAM) + start,
                at, count, quad, seed,
                rate, decay, unscale, unbias1, unbias_root, beta1, weight1, beta2, weight2, eps,
                IS_ATAN2, WRITE_BACK, UNIT,
            )  # fmt: skip


@triton.jit
def _step_block(
    param, grad, exp_avg, exp_avg_sq, residual, at, count, quad, seed,
    rate, decay, unscale, unbias1, unbias_root, beta1, weight1, beta2, weight2, eps,
    IS_ATAN2: tl.constexpr, WRITE_BACK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Step the block that starts at `at`; `count` masks elements beyond the end."""
    SIZE: tl.constexpr = BLOCK if count is None else MASKED_BLOCK
    lane = at + tl.arange(0, SIZE)
    mask = None if count is None else lane < count
    g = tl.load(grad + lane, mask=mask).to(tl.float32) * unscale
    m = tl.load(exp_avg + lane, mask=mask)
    v = tl.load(exp_avg_sq + lane, mask=mask)
    plain = tl.load(param + lane, mask=mask)
    w = plain.to(tl.float32)
    if WRITE_BACK == "kahan":
        rest = tl.load(residual + lane, mask=mask).to(tl.float32)
        w = join_block(w, rest, plain.dtype, UNIT)

    # torch.lerp is also exact at the nearer end.
    m = tl.where(weight1 < 0.5, m + weight1 * (g - m), g - beta1 * (g - m))
    v = beta2 * v + weight2 * g * g
    root = tl.sqrt(v) * unbias_root
    if IS_ATAN2:
        update = _ATAN2_A * _atan2(m * unbias1, _ATAN2_B * root)
    else:
        update = m * unbias1 / (root + eps)
    w = w * decay - rate * update

    tl.store(exp_avg + lane, m, mask=mask)
    tl.store(exp_avg_sq + lane, v, mask=mask)
    if WRITE_BACK == "stochastic":
        w = _round_stochastically(w, SIZE, plain.dtype, seed, quad + at // 4)
    kept = w.to(plain.dtype)
    tl.store(param + lane, kept, mask=mask)
    if WRITE_BACK == "kahan":
        rest = residual_of_block(w, kept.to(tl.float32), plain.dtype, UNIT)
        tl.store(residual + lane, rest, mask=mask)


@triton.jit(do_not_specialize=["num_tensors", "grad_scale", "found_inf"])
def rms_kernel(
    table,
    parts,
    partials,
    grad_scale,
    found_inf,
    num_tensors,
    beta2,
    weight2,
    log_beta2,
    floor,
    sign,
    GRAD: tl.constexpr,
):
    """Store the partial sum of `(g / max(sqrt(v), eps))^2` over one part of one tensor.

    A tensor has at most `MAX_PARTS` parts.

    Args:
        table: Addresses and sizes of the tensors, see `ROWS`.
        parts: int32 of shape (parts of all tensors, 2): tensor index and part index.
        partials: fp32 output, one element per part.
        floor: `max(eps, smallest normal number)`.

    The other arguments are those of `adamw_kernel`.
    """
    if _is_clean(found_inf):
        of_tensor = table + tl.load(parts + 2 * tl.program_id(0))
        step = tl.load(_of(tl.load(of_tensor + _STEP * num_tensors), tl.float32))
        unbias_root = 1 / tl.sqrt(_correction(step, log_beta2))
        unscale = _unscale(grad_scale, sign)

        size = tl.load(of_tensor + _SIZE * num_tensors)
        num_parts = tl.load(of_tensor + _NUM_PARTS * num_tensors)
        # A part spans whole blocks, so that it has the alignment of its tensor.
        span = tl.cdiv(tl.cdiv(size, num_parts), BLOCK) * BLOCK
        start = tl.load(parts + 2 * tl.program_id(0) + 1) * span
        count = tl.maximum(tl.minimum(size - start, span), 0).to(tl.int32)
        is_aligned = tl.load(of_tensor + _IS_ALIGNED * num_tensors) != 0
        whole = tl.where(is_aligned, count // BLOCK * BLOCK, 0)
        grad = tl.load(of_tensor + _GRAD * num_tensors)
        exp_avg_sq = tl.load(of_tensor + _EXP_AVG_SQ * num_tensors)

        grad_at = tl.multiple_of(_of(grad, GRAD) + start, 16)
        exp_avg_sq_at = tl.multiple_of(_of(exp_avg_sq, tl.float32) + start, 16)
        total, rest = tl.zeros([BLOCK], tl.float32), tl.zeros([MASKED_BLOCK], tl.float32)
        for at in range(0, whole, BLOCK):
            total += _squares_of_block(
                grad_at, exp_avg_sq_at, at, None, unscale, beta2, weight2, unbias_root, floor
            )
        for at in range(whole, count, MASKED_BLOCK):
            rest += _squares_of_block(
                _of(grad, GRAD) + start, _of(exp_avg_sq, tl.float32) + start, at, count,
                unscale, beta2, weight2, unbias_root, floor,
            )  # fmt: skip
        tl.store(partials + tl.program_id(0), tl.sum(total, axis=0) + tl.sum(rest, axis=0))


@triton.jit
def _squares_of_block(
    grad, exp_avg_sq, at, count, unscale, beta2, weight2, unbias_root, floor
):  # fmt: skip
    SIZE: tl.constexpr = BLOCK if count is None else MASKED_BLOCK
    lane = at + tl.arange(0, SIZE)
    mask = None if count is None else lane < count
    other = None if count is None else 0.0
    g = tl.load(grad + lane, mask=mask, other=other).to(tl.float32) * unscale
    v = tl.load(exp_avg_sq + lane, mask=mask, other=other)
    root = tl.sqrt(beta2 * v + weight2 * g * g) * unbias_root
    ratio = g / tl.where(root < floor, floor, root)  # NaN stays
    return ratio * ratio


@triton.jit
def _of(address, FORMAT: tl.constexpr):
    return address.to(tl.pointer_type(FORMAT))


@triton.jit
def _is_clean(found_inf):
    """Return whether to perform the step; always true without `found_inf`."""
    return True if found_inf is None else tl.load(found_inf) == 0


@triton.jit
def _unscale(grad_scale, sign):
    """Return the factor of the gradients."""
    return sign if grad_scale is None else sign / tl.load(grad_scale).to(tl.float32)


@triton.jit
def _correction(step, log_beta):
    """Return `1 - beta^step`; evaluated directly, fp32 would lose 4 of 7 digits at first."""
    x = step * log_beta
    # Taylor series of expm1: terms up to x^8 / 8! reach fp32 precision for x > -0.5.
    near = 1 + x * (1 / 8)
    for factor in tl.static_range(7, 1, -1):
        near = 1 + x * (1 / factor) * near
    return tl.where(x > -0.5, -x * near, 1 - tl.exp(x))


@triton.jit
def _atan2(y, x):
    """Return atan2(y, x) for x >= 0 with an error of 3e-7; atan2(0, 0) is 0."""
    height = tl.abs(y)
    is_steep = height > x
    ratio = tl.where(is_steep, x, height) / tl.where(is_steep, height, x)
    ratio = tl.where(height == x, 1.0, ratio)  # not 0 / 0 or inf / inf
    square = ratio * ratio
    # Interpolates arctan(sqrt(t)) / sqrt(t) at Chebyshev nodes on [0, 1].
    angle = 0.0028340641874819994
    angle = angle * square - 0.016005029901862144
    angle = angle * square + 0.042587608098983765
    angle = angle * square - 0.07495445758104324
    angle = angle * square + 0.10636754333972931
    angle = angle * square - 0.14202570915222168
    angle = angle * square + 0.19992484152317047
    angle = angle * square - 0.3333306610584259
    angle = ratio + ratio * square * angle
    angle = tl.where(is_steep, _HALF_PI - angle, angle)
    angle = tl.where(height + x == 0, 0.0, angle)
    return tl.where(y < 0, -angle, angle)


@triton.jit
def _round_stochastically(w, SIZE: tl.constexpr, HALF: tl.constexpr, seed, first_quad):
    """Round stochastically to one of the two neighbors, without bias, like `round_stochastically`.

    Philox draws four words at a time, for four consecutive elements.

    Args:
        first_quad: Index of the block's first group of four elements among all tensors.
    """
    LOST: tl.constexpr = 23 - HALF.fp_mantissa_width
    quad = first_quad + tl.arange(0, SIZE // 4)
    low, high = quad.to(tl.uint32), (quad >> 32).to(tl.uint32)
    none = low * 0
    word0, word1, word2, word3 = tl.philox(seed, low, high, none, none)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    noise = (tl.reshape(words, [SIZE]) >> (32 - LOST)).to(tl.int32)
    # A carry out of the dropped fp32 bits moves the magnitude to the next neighbor.
    bits = w.to(tl.int32, bitcast=True) + noise
    rounded = (bits >> LOST << LOST).to(tl.float32, bitcast=True)
    size = tl.abs(w)
    if LOST == 13:  # below 2^-14 the spacing of fp16 is 2^-24
        steps = tl.floor(size * 16777216.0 + noise.to(tl.float32) * (1 / 8192)) * (1 / 16777216.0)
        steps = tl.where(w < 0, -steps, steps)
        rounded = tl.where(size < 6.103515625e-05, steps, rounded)
    return tl.where(size < _INF, rounded, w)
