"""The oracle against cases worked out by hand and against PyTorch; the measures of error against planted faults."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from portable_flash import reference
from portable_flash.backends import Gradients, Inputs
from portable_flash.problem import Problem


def problem_of(query, key, value, **options):
    """Problem of (B, H, S, D) tensors."""
    batch, heads_q, seqlen_q, head_dim = query.shape
    return Problem(
        query.dtype, batch=batch, heads_q=heads_q, heads_k=key.shape[1], seqlen_q=seqlen_q, seqlen_k=key.shape[2],
        head_dim=head_dim, head_dim_v=value.shape[3], **options,
    )  # fmt: skip


def weights(rows, keys, inputs=None, **options):
    """P of a call whose scores are all 0 before bias and ALiBi, read through V = identity."""
    query, key, value = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, keys, 1), torch.eye(keys)[None, None]
    call = Inputs(query, key, value, scale=1.0, **(inputs or {}))
    out, lse = reference.attend(call, problem_of(query, key, value, **options))
    return out[0, 0], lse[0, 0]


# ---------------------------------------------------------------- the oracle by hand
def two_keys(**changes):
    """One query, two keys, scores 0 and log 3: P = 1/4, 3/4."""
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1)
    value = torch.tensor([8.0, 16.0]).view(1, 1, 2, 1)
    inputs = replace(Inputs(query, key, value, scale=1.0), **changes)
    out, lse = reference.attend(inputs, problem_of(query, key, value))
    return out.item(), lse.item()


def test_softmax():
    assert two_keys() == pytest.approx((0.25 * 8 + 0.75 * 16, math.log(4)))


def test_scale_zero_and_negative():
    assert two_keys(scale=0.0) == pytest.approx((12, math.log(2)))
    assert two_keys(scale=-1.0) == pytest.approx((0.75 * 8 + 0.25 * 16, math.log(4 / 3)))


def test_sink_is_in_the_denominator_only():
    assert two_keys(sinks=torch.tensor([math.log(4)])) == pytest.approx(((8 + 3 * 16) / 8, math.log(8)))
    assert two_keys(sinks=torch.tensor([math.log(4)]), scale=0.0) == pytest.approx(((8 + 16) / 6, math.log(6))), "not scaled"


def test_softcap_comes_before_bias_and_sink():
    capped = math.exp(0.5 * math.tanh(math.log(3) / 0.5))
    assert two_keys(softcap=0.5) == pytest.approx(((8 + capped * 16) / (1 + capped), math.log(1 + capped)))
    bias = torch.tensor([0.0, 2.0]).view(1, 1, 1, 2)
    capped *= math.exp(2)
    expected = (8 + capped * 16) / (1 + capped + math.exp(5)), math.log(1 + capped + math.exp(5))
    assert two_keys(softcap=0.5, bias=bias, sinks=torch.tensor([5.0])) == pytest.approx(expected)


@pytest.mark.parametrize(
    "rows, keys, options, seen",
    [
        (2, 4, dict(window_right=0), [[0, 1, 2], [0, 1, 2, 3]]),
        (2, 4, dict(window_right=0, top_left=True), [[0], [0, 1]]),
        (4, 2, dict(window_right=0), [[], [], [0], [0, 1]]),
        (4, 2, dict(window_right=0, top_left=True), [[0], [0, 1], [0, 1], [0, 1]]),
        (3, 3, dict(window_left=1), [[0, 1, 2], [0, 1, 2], [1, 2]]),
        (3, 3, dict(window_left=0, window_right=1), [[0, 1], [1, 2], [2]]),
        (2, 5, dict(window_left=1, window_right=0), [[2, 3], [3, 4]]),
        (2, 5, dict(window_left=1, window_right=0, top_left=True), [[0], [0, 1]]),
        (5, 2, dict(window_left=0, window_right=0), [[], [], [], [0], [1]]),
    ],
)
def test_visibility(rows, keys, options, seen):
    p, lse = weights(rows, keys, **options)
    expected = torch.zeros(rows, keys, dtype=torch.float64)
    for i, row in enumerate(seen):
        expected[i, row] = 1 / max(1, len(row))
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close(lse, torch.tensor([math.log(len(row)) if row else -math.inf for row in seen], dtype=torch.float64))


def test_alibi_distance_counts_from_the_bottom_right():
    p, lse = weights(2, 3, dict(alibi_slopes=torch.tensor([[0.5]])))
    distance = torch.tensor([[1, 0, 1], [2, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(p, (-0.5 * distance).softmax(-1))
    torch.testing.assert_close(lse, (-0.5 * distance).logsumexp(-1))


def test_mask_and_bias_must_agree():
    mask = torch.tensor([[True, True, False], [True, False, False]]).view(1, 1, 2, 3)
    bias = torch.tensor([-math.inf, 0.0, 0.0]).view(1, 1, 1, 3)
    p, lse = weights(2, 3, dict(mask=mask, bias=bias))
    assert p.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert lse.tolist() == [0, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_bias_is_no_mask(dtype):
    p, lse = weights(1, 4, dict(bias=torch.full((1, 1, 1, 4), torch.finfo(dtype).min, dtype=dtype)))
    assert p.tolist() == [[0.25] * 4]
    assert math.isfinite(lse.item())


def test_no_keys():
    p, lse = weights(2, 0)
    assert p.shape == (2, 0)
    assert lse.tolist() == [-math.inf] * 2
    _, lse = weights(2, 0, dict(sinks=torch.tensor([3.0])))
    assert lse.tolist() == [3.0] * 2


def test_query_heads_share_key_heads_in_order():
    query, key = torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1)
    value = torch.tensor([5.0, 7.0]).view(1, 2, 1, 1)
    out, _ = reference.attend(Inputs(query, key, value, scale=1.0), problem_of(query, key, value))
    assert out.flatten().tolist() == [5, 5, 5, 7, 7, 7]


def test_packed_sequences_stand_alone():
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 3), torch.randn(12, 2, 3), torch.randn(12, 2, 5)
    cu_q, cu_k = torch.tensor([0, 2, 2, 6]), torch.tensor([0, 5, 8, 8])
    bias = torch.randn(3, 1, 4, 5)
    inputs = Inputs(query, key, value, scale=0.7, bias=bias, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    problem = Problem(
        torch.float32, batch=3, heads_q=4, heads_k=2, seqlen_q=4, seqlen_k=5, head_dim=3, head_dim_v=5, window_right=0,
        varlen=True, total_q=9, total_k=12,
    )  # fmt: skip
    out, lse = reference.attend(inputs, problem)
    alone = [t.transpose(0, 1)[None] for t in (query[:2], key[:5], value[:5])]
    expected, expected_lse = reference.attend(Inputs(*alone, scale=0.7, bias=bias[:1, :, :2, :5]), problem_of(*alone, window_right=0))
    torch.testing.assert_close(out[:2], expected[0].transpose(0, 1))
    torch.testing.assert_close(lse[:, :2], expected_lse[0])
    assert not out[2:].any(), "the third sequence has no keys, and the last rows belong to no sequence"
    assert (lse[:, 2:] == -math.inf).all()


# ---------------------------------------------------------------- the oracle against PyTorch
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "bias"])
def test_against_pytorch_math(kind):
    torch.manual_seed(1)
    query = torch.randn(2, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 2, 9, d, dtype=torch.float64, requires_grad=True) for d in (8, 5))
    mask = torch.rand(2, 1, 9, 9) > 0.3 if kind == "mask" else None
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64, requires_grad=True) if kind == "bias" else None
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(
            query, key, value, attn_mask=mask if bias is None else bias, is_causal=kind == "causal", scale=0.3, enable_gqa=True
        )
    inputs = Inputs(query, key, value, scale=0.3, mask=mask, bias=bias)
    problem = problem_of(query, key, value, window_right=0 if kind == "causal" else None)
    grad_out = torch.randn_like(expected)
    names = ("query", "key", "value") + (("bias",) if bias is not None else ())
    out, _, grads = reference.differentiate(inputs, problem, grad_out, None, names)
    torch.testing.assert_close(out, expected.detach())
    for name, gradient in zip(names, torch.autograd.grad(expected, [getattr(inputs, n) for n in names], grad_out), strict=True):
        torch.testing.assert_close(getattr(grads, name), gradient)

    bshd = replace(inputs, query=query.transpose(1, 2), key=key.transpose(1, 2), value=value.transpose(1, 2), layout="bshd")
    torch.testing.assert_close(reference.attend(bshd, problem)[0].transpose(1, 2), expected)


def test_what_is_hidden_may_be_nan():
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, 2, 4, 3) for _ in range(3))
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 1] = False
    mask[..., 2, :] = False
    clean = Inputs(query, key, value, scale=1.0, mask=mask)
    grad_out, grad_lse = torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4)
    problem = replace(problem_of(query, key, value), mask=True)
    expected = reference.differentiate(clean, problem, grad_out, grad_lse, ("query", "key", "value"))
    dirty = replace(clean, query=query.clone(), key=key.clone(), value=value.clone())
    grad_out = grad_out.clone()
    for tensor, position in ((dirty.query, 2), (grad_out, 2), (dirty.key, 1), (dirty.value, 1)):
        tensor[:, :, position] = math.nan
    actual = reference.differentiate(dirty, problem, grad_out, grad_lse, ("query", "key", "value"))
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(actual[2], name), getattr(expected[2], name))


# ---------------------------------------------------------------- the measures
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def result(request):
    """A call and a right result of it: what float64 gives, rounded once."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(request.param)
    inputs = Inputs(draw(1, 4, 96, 64), draw(1, 2, 96, 64), draw(1, 2, 96, 64), scale=0.125)
    problem = problem_of(inputs.query, inputs.key, inputs.value, window_right=0)
    grad_out, grad_lse = draw(1, 4, 96, 64), torch.randn(1, 4, 96, generator=generator)
    out, lse, grads = reference.differentiate(inputs, problem, grad_out, grad_lse, ("query", "key", "value"))
    grads = Gradients(*(t.to(request.param) for t in (grads.query, grads.key, grads.value)))
    return inputs, problem, out.to(request.param), lse.float(), grads, grad_out, grad_lse


def judge(result, **changes):
    """Status of each tensor, some replaced."""
    inputs, problem, out, lse, grads, grad_out, grad_lse = result
    grads = replace(grads, **{n: t for n, t in changes.items() if n in ("query", "key", "value")})
    verdicts = reference.compare_call(inputs, problem, changes.get("out", out), changes.get("lse", lse), grads, grad_out, grad_lse)
    assert [v.name for v in verdicts] == ["out", "lse", "grad_query", "grad_key", "grad_value"]
    assert all(str(v).startswith(f"{v.name}: {v.status}") for v in verdicts)
    return {v.name.removeprefix("grad_"): v for v in verdicts}


def tensors(result):
    _, _, out, lse, grads, _, _ = result
    return {"out": out, "lse": lse, "query": grads.query, "key": grads.key, "value": grads.value}


def test_a_right_result_passes(result):
    assert all(v.ok for v in judge(result).values())


def test_unfused_pytorch_passes_with_ratio_one(result):
    inputs, problem, _, lse, _, grad_out, grad_lse = result
    out, _, grads = reference.differentiate(inputs, problem, grad_out, grad_lse, ("query", "key", "value"), inputs.query.dtype)
    verdicts = reference.compare_call(inputs, problem, out, lse, grads, grad_out, grad_lse)
    assert all(v.ok for v in verdicts)
    assert [v.ratio for v in verdicts if v.name != "lse"] == [1.0] * 4


@pytest.mark.parametrize("name", ["out", "lse", "query", "key", "value"])
@pytest.mark.parametrize("fault", ["element", "tile", "nan", "inf", "zeros", "heads", "shape", "dtype"])
def test_planted_faults_fail(result, name, fault):
    right = tensors(result)[name]
    wrong = right.clone()
    flat = wrong.view(-1)
    middle = flat.numel() // 2
    if fault == "element":
        flat[flat.abs().argmax()] *= 0.9
    elif fault == "tile":
        flat[middle : middle + reference.TILE] *= 1.02 if right.dtype == torch.bfloat16 and name != "out" else 1.01
    elif fault in ("nan", "inf"):
        flat[middle] = float(fault)
    elif fault == "zeros":
        wrong.zero_()
    elif fault == "heads":
        wrong = wrong.roll(1, 1)
    elif fault == "shape":
        wrong = wrong[..., :-1]
    elif fault == "dtype":
        wrong = wrong.double()
    verdicts = judge(result, **{name: wrong})
    assert verdicts.pop(name).status == "fail"
    assert all(v.ok for v in verdicts.values()), "only the wrong tensor is blamed"


@pytest.mark.parametrize("name", ["out", "query", "key", "value"])
def test_one_element_is_seen_by_the_largest_error_alone(result, name):
    right = tensors(result)[name]
    wrong = right.double()
    wrong.view(-1)[wrong.numel() // 2] += 1.2 * judge(result)[name].max_limit
    wrong = wrong.to(right.dtype)
    verdict = judge(result, **{name: wrong})[name]
    assert verdict.detail == "largest error beyond its limit"


def test_a_tile_is_seen_by_its_rms_alone(result):
    wrong = result[2].clone()
    if wrong.dtype == torch.float32:
        pytest.skip("float32 is so exact that the largest error sees it too")
    middle = wrong.numel() // 2
    wrong.view(-1)[middle : middle + reference.TILE] *= 1.01 if wrong.dtype == torch.bfloat16 else 1.001
    assert judge(result, out=wrong)["out"].detail == f"RMS of tile {middle // reference.TILE} beyond its limit"


def test_the_worst_element_is_named(result):
    out = result[2].clone()
    out[0, 1, 50, 7] += 3
    verdict = judge(result, out=out)["out"]
    assert verdict.worst == (0, 1, 50, 7)
    assert verdict.actual == out[verdict.worst].item()
    assert abs(verdict.expected - (verdict.actual - 3)) < 0.05
    assert "(0, 1, 50, 7)" in str(verdict)


@pytest.mark.parametrize("shift", [1e-3, -1e-3, math.log(2) / 96])
def test_shifted_lse_fails(result, shift):
    assert not judge(result, lse=result[3] + shift)["lse"].ok


def test_lse_in_base_two_fails(result):
    assert not judge(result, lse=result[3] / math.log(2))["lse"].ok


def test_infinities_must_be_where_they_belong():
    expected = torch.tensor([1.0, -math.inf, math.nan], dtype=torch.float64)
    verdict = lambda *values: reference.check("x", torch.tensor(values), expected, expected)
    assert verdict(1.0, -math.inf, math.nan).ok
    assert verdict(1.0, math.inf, math.nan).status == "fail"
    assert verdict(1.0, -math.inf, 0.0).status == "fail"
    assert verdict(1.0, 0.0, math.nan).status == "fail"
    assert verdict(-math.inf, -math.inf, math.nan).status == "fail"


def test_a_bad_yardstick_gives_no_verdict():
    torch.manual_seed(4)
    expected = torch.randn(64, dtype=torch.float64)
    for lowprec in (expected * 1.2, torch.full_like(expected, math.nan)):
        verdict = reference.check("x", expected.float(), expected, lowprec)
        assert verdict.status == "inconclusive"
        assert not verdict.ok
    wrong = expected.float()
    wrong[3] = math.nan
    assert reference.check("x", wrong, expected, expected * 1.2).status == "fail", "NaN needs no yardstick"


def test_sums_that_cancel_to_zero_may_round():
    expected = torch.zeros(8, dtype=torch.float64)
    noise = torch.full((8,), 1e-6)
    assert reference.check("x", noise, expected, expected, summands=20.0).ok
    assert not reference.check("x", noise, expected, expected, summands=1.0).ok
    assert not reference.check("x", noise, expected, expected).ok


def test_empty_tensors_pass():
    empty = torch.zeros(0, 4)
    assert reference.check("x", empty, empty.double(), empty).ok
