"""The public calls: laws that results obey whatever the numbers, and what is said of wrong arguments."""

import math
import re

import pytest
import torch
from calls import Case

import portable_flash
from portable_flash import attention, attention_varlen, explain, functional, reference

F64 = torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def qkv(batch=2, heads_q=4, rows=19, head_dim=16, heads_k=2, keys=31, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64).to(dtype)
    return draw(batch, heads_q, rows, head_dim), draw(batch, heads_k, keys, head_dim), draw(batch, heads_k, keys, head_dim)


def gradients(f, *tensors):
    """Of a fixed random functional of f's output and lse, by each tensor."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    generator = torch.Generator().manual_seed(7)
    outputs = f(*leaves)
    weights = [torch.randn(t.shape, generator=generator, dtype=F64).to(t.dtype) for t in outputs]
    return torch.autograd.grad([torch.where(t == -torch.inf, 0, t) for t in outputs], leaves, weights)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


# ------------------------------------------------------------------ against the oracle, through the front door
@pytest.mark.parametrize("packed", [False, True])
def test_everything_at_once(packed):
    sizes = dict(lengths=((9, 14), (0, 3), (11, 0), (5, 20)), unused=3) if packed else dict(seqlen_q=19, seqlen_k=31)
    options = dict(causal=True, window=(17, None), softcap=2.0, bias="hqk", mask="bk", alibi="bh", sinks=True, head_dim_v=24, scale=-0.5)
    Case(**sizes, **options).draw().check()


# ------------------------------------------------------------------ laws
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(5, 2), softcap=2.0)])
def test_layout_is_a_name(options):
    """bshd is bhsd with its dimensions swapped, bit for bit, output, lse and gradients."""
    q, k, v = qkv()
    swapped = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out, lse = attention(q, k, v, return_lse=True, **options)
    out_bshd, lse_bshd = attention(*swapped, layout="bshd", return_lse=True, **options)
    assert out_bshd.shape == (2, 19, 4, 16) and torch.equal(out_bshd.transpose(1, 2), out) and torch.equal(lse_bshd, lse)
    a = gradients(lambda *t: attention(*t, return_lse=True, **options), q, k, v)

    def through_bshd(*tensors):
        out, lse = attention(*(t.transpose(1, 2) for t in tensors), layout="bshd", return_lse=True, **options)
        return out.transpose(1, 2), lse

    assert all(torch.equal(x, y) for x, y in zip(a, gradients(through_bshd, q, k, v)))


@pytest.mark.parametrize("how", ["transposed", "sliced", "columns", "expanded"])
def test_strides_are_free(how):
    from calls import strided

    q, k, v = qkv()
    if how == "expanded":
        k, v = (t[:1].expand_as(t) for t in (k, v))
        plain = attention(q, k.contiguous(), v.contiguous(), causal=True)
        assert torch.equal(attention(q, k, v, causal=True), plain)
    else:
        assert torch.equal(attention(*(strided(t, how) for t in (q, k, v)), causal=True), attention(q, k, v, causal=True))


@pytest.mark.parametrize("n", [1, 7, 18])
def test_chunks_of_queries(n):
    """Causal is bottom-right: new queries against the whole cache are the last rows of the whole call."""
    q, k, v = qkv(rows=31, dtype=F64)
    whole, lse = attention(q, k, v, causal=True, window=(12, None), return_lse=True)
    part, part_lse = attention(q[:, :, n:], k, v, causal=True, window=(12, None), return_lse=True)
    close(part, whole[:, :, n:])
    close(part_lse, lse[:, :, n:])
    first = attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], causal=True, window=(12, None))
    close(first, whole[:, :, :n])


def test_chunks_of_keys_merge_by_lse():
    q, k, v = qkv(dtype=F64)
    whole, lse = attention(q, k, v, return_lse=True)
    (a, la), (b, lb) = (attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 11), slice(11, None)))
    close(torch.logaddexp(la, lb), lse)
    close((la - lse).exp()[..., None] * a + (lb - lse).exp()[..., None] * b, whole)


def test_order_of_keys_does_not_matter():
    q, k, v = qkv(dtype=F64)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(0))
    f = lambda q, k, v: attention(q, k, v, return_lse=True)
    permuted = lambda q, k, v: attention(q, k[:, :, order], v[:, :, order], return_lse=True)
    close(permuted(q, k, v), f(q, k, v))
    close(gradients(permuted, q, k, v), gradients(f, q, k, v))


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(softcap=2.0, window=(3, 4))])
def test_grouped_heads_are_repeated_heads(options):
    q, k, v = qkv(heads_q=6, heads_k=2, dtype=F64)
    grouped = lambda q, k, v: attention(q, k, v, return_lse=True, **options)
    repeated = lambda q, k, v: attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), return_lse=True, **options)
    close(grouped(q, k, v), repeated(q, k, v))
    close(gradients(grouped, q, k, v), gradients(repeated, q, k, v))


RULES = [
    (False, (3, 4)), (False, (0, 0)), (False, (None, 2)), (False, (6, None)), (True, None), (True, (5, None)), (True, (5, 9)),
    ("bottom_right", None), ("top_left", None), ("top_left", (4, None)), ("top_left", (None, 3)),
]  # fmt: skip


@pytest.mark.parametrize("rows, keys", [(19, 31), (31, 19), (1, 7), (7, 1)])
@pytest.mark.parametrize("causal, window", RULES, ids=str)
def test_window_is_a_mask(causal, window, rows, keys):
    q, k, v = qkv(rows=rows, keys=keys, dtype=F64)
    i, j = torch.arange(rows)[:, None] + (0 if causal == "top_left" else keys - rows), torch.arange(keys)
    left, right = window or (None, None)
    right = 0 if causal else right
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask &= torch.tensor(True) if left is None else j >= i - left
    mask &= torch.tensor(True) if right is None else j <= i + right
    f = lambda *t: attention(*t, causal=causal, window=window, return_lse=True)
    g = lambda *t: attention(*t, mask=mask, return_lse=True)
    close(f(q, k, v), g(q, k, v))
    close(gradients(f, q, k, v), gradients(g, q, k, v))
    if window is not None:
        assert torch.equal(attention(q, k, v, causal=causal, window=list(window)), f(q, k, v)[0])


@pytest.mark.parametrize("rows, keys", [(19, 31), (31, 19)])
def test_wide_windows_are_none(rows, keys):
    """A reach that hides nothing is no reach; one key less hides one pair."""
    q, k, v = qkv(rows=rows, keys=keys)
    plain = attention(q, k, v)
    idle_left, idle_right = keys - 1, rows - 1
    for window in ((idle_left, None), (None, idle_right), (idle_left, idle_right), (2**40, 2**40)):
        assert torch.equal(attention(q, k, v, window=window), plain)
    assert not torch.equal(attention(q, k, v, window=(idle_left - 1, None)), plain)
    assert not torch.equal(attention(q, k, v, window=(None, idle_right - 1)), plain)


def test_minus_infinite_bias_is_a_mask():
    q, k, v = qkv(dtype=F64)
    mask = torch.rand(2, 1, 19, 31, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0, :, 3] = False
    bias = torch.zeros(2, 1, 19, 31, dtype=F64).masked_fill(~mask, -torch.inf)
    f, g = lambda *t: attention(*t, mask=mask, return_lse=True), lambda *t: attention(*t, bias=bias, return_lse=True)
    assert (f(q, k, v)[1][0, :, 3] == -torch.inf).all() and not f(q, k, v)[0][0, :, 3].any()
    close(f(q, k, v), g(q, k, v))
    close(gradients(f, q, k, v), gradients(g, q, k, v))


def test_alibi_is_a_bias():
    q, k, v = qkv(rows=31, keys=19, dtype=F64)
    slopes = torch.rand(2, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    distance = (torch.arange(31)[:, None] + 19 - 31 - torch.arange(19)).abs()
    f = lambda *t: attention(*t, alibi_slopes=slopes, causal="top_left", return_lse=True)
    g = lambda *t: attention(*t, bias=-slopes[..., None, None] * distance, causal="top_left", return_lse=True)
    close(f(q, k, v), g(q, k, v))
    close(gradients(f, q, k, v), gradients(g, q, k, v))
    assert torch.equal(attention(q, k, v, alibi_slopes=slopes[0]), attention(q, k, v, alibi_slopes=slopes[:1].expand(2, 4)))


def test_scale_folds_into_the_query():
    q, k, v = qkv(dtype=F64)
    for scale in (0.3, -0.7, 2, 0.0):
        close(attention(q, k, v, scale=scale), attention(q * scale, k, v, scale=1.0))
    close(attention(q, k, v), attention(q, k, v, scale=16**-0.5))
    close(attention(q, k, v, scale=0.0), v.mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 19, 16))


def test_softcap_off_and_far():
    q, k, v = qkv(dtype=F64)
    plain = attention(q, k, v)
    assert torch.equal(attention(q, k, v, softcap=0), plain) and torch.equal(attention(q, k, v, softcap=None), plain)
    torch.testing.assert_close(attention(q, k, v, softcap=1e6), plain, atol=1e-9, rtol=1e-9)


def test_sinks_are_keys_without_value():
    q, k, v = qkv(heads_q=2, dtype=F64)
    sinks = torch.tensor([0.7, -1.0], dtype=F64)
    # one more key, hidden from nothing, whose logit is a bias and whose value is 0
    bias = torch.zeros(1, 2, 19, 32, dtype=F64)
    bias[..., 31] = sinks[:, None]
    more = lambda t: torch.cat([t, torch.zeros_like(t[:, :, :1])], 2)
    f = lambda *t: attention(*t, sinks=sinks, return_lse=True)
    g = lambda q, k, v: attention(q, more(k), more(v), bias=bias, return_lse=True)
    close(f(q, k, v), g(q, k, v))
    close(gradients(f, q, k, v), gradients(g, q, k, v))


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(4, 2)), dict(softcap=2.0), dict(causal="top_left")], ids=str)
def test_packed_is_a_loop(options):
    lengths = ((9, 14), (0, 3), (11, 0), (5, 20), (7, 7))
    call = Case(lengths=lengths, unused=3, dtype=F64).draw()
    outs, lses, first_q, first_k = [], [], 0, 0
    for rows, keys in lengths:
        part = lambda t, start, n: t[start : start + n].transpose(0, 1)[None]
        out, lse = attention(
            part(call.query, first_q, rows), part(call.key, first_k, keys), part(call.value, first_k, keys), return_lse=True, **options
        )
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
        first_q, first_k = first_q + rows, first_k + keys
    bounds = (call.cu_seqlens_q, call.cu_seqlens_k, 11, 20)
    out, lse = attention_varlen(call.query, call.key, call.value, *bounds, return_lse=True, **options)
    close(out[:-3], torch.cat(outs))
    close(lse[:, :-3], torch.cat(lses, 1))
    assert not out[-3:].any() and (lse[:, -3:] == -torch.inf).all()
    wider = attention_varlen(call.query, call.key, call.value, *bounds[:2], 100, 200, layout="bshd", **options)
    assert torch.equal(wider, out)
    longs = attention_varlen(call.query, call.key, call.value, *(b.long() for b in bounds[:2]), 11, 20, **options)
    assert torch.equal(longs, out)


def test_packed_bias_and_mask_count_from_each_start():
    call = Case(lengths=((9, 14), (5, 20)), bias="hqk", mask="bqk", dtype=F64, alibi="bh", sinks=True).draw()
    outs = []
    for n, (rows, keys, first_q, first_k) in enumerate(((9, 14, 0, 0), (5, 20, 9, 14))):
        part = lambda t, start, size: t[start : start + size].transpose(0, 1)[None]
        outs.append(
            attention(
                part(call.query, first_q, rows), part(call.key, first_k, keys), part(call.value, first_k, keys),
                bias=call.bias[:, :, :rows, :keys], mask=call.mask[n : n + 1, :, :rows, :keys], sinks=call.sinks,
                alibi_slopes=call.alibi_slopes[n],
            )[0].transpose(0, 1)
        )  # fmt: skip
    close(call.attention()[0], torch.cat(outs))


@pytest.mark.parametrize("shape", [(), (31,), (19, 1), (4, 1, 31), (1, 4, 19, 31), (2, 1, 1, 1)], ids=str)
def test_bias_and_mask_broadcast(shape):
    q, k, v = qkv()
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attention(q, k, v, bias=bias), attention(q, k, v, bias=bias.expand(2, 4, 19, 31).contiguous()))
    mask = bias > -0.5
    assert torch.equal(attention(q, k, v, mask=mask), attention(q, k, v, mask=mask.expand(2, 4, 19, 31).contiguous()))
    leaf = bias.clone().requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, k, v, bias=leaf).square().sum(), leaf)
    assert grad.shape == leaf.shape and grad.dtype == leaf.dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sinks_and_slopes_of_any_dtype(dtype):
    """Sinks keep their dtype in the gradient; both are consumed in float32 (float64 for float64 inputs)."""
    q, k, v = qkv()
    sinks, slopes = torch.linspace(-1, 1, 4).to(dtype).requires_grad_(), torch.linspace(0.1, 0.4, 4).to(dtype)
    out = attention(q, k, v, sinks=sinks, alibi_slopes=slopes)
    assert torch.equal(out, attention(q, k, v, sinks=sinks.float(), alibi_slopes=slopes.float()))
    assert torch.autograd.grad(out.sum(), sinks)[0].dtype == dtype


def test_parameters_are_tensors():
    q, k, v = (torch.nn.Parameter(t) for t in qkv())
    assert torch.equal(attention(q, k, v), attention(q.data, k.data, v.data))


def test_deterministic_is_accepted_and_repeats():
    q, k, v = qkv()
    f = lambda *t: attention(*t, deterministic=True, return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(f, q, k, v), gradients(f, q, k, v)))


# ------------------------------------------------------------------ degenerate sizes
EMPTY = [dict(batch=0), dict(heads_k=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0)]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", EMPTY, ids="-".join)
@pytest.mark.parametrize("options", [{}, dict(causal=True, sinks=True), dict(bias="hqk", mask="bk")], ids=lambda o: "-".join(o) or "plain")
def test_empty(sizes, options, layout):
    out, lse, grads = Case(**{**dict(seqlen_q=5, seqlen_k=7), **sizes}, **options, layout=layout).draw().check()
    if sizes == dict(seqlen_k=0):
        assert not out.any() and not grads.query.any()


def test_no_sequences():
    q, cu = torch.zeros(0, 2, 8), torch.zeros(1, dtype=torch.int32)
    out, lse = attention_varlen(q, q, q, cu, cu, 0, 0, return_lse=True, validate=True)
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)


@pytest.mark.parametrize("head_dim, head_dim_v", [(1, 1), (1, 256), (256, 1), (7, 13)])
def test_any_head_dim(head_dim, head_dim_v):
    Case(seqlen_q=9, seqlen_k=11, head_dim=head_dim, head_dim_v=head_dim_v).draw().check()


# ------------------------------------------------------------------ wrong arguments
Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8)
PQ, PK, CU_Q, CU_K = torch.zeros(5, 4, 8), torch.zeros(6, 2, 8), torch.tensor([0, 2, 5]), torch.tensor([0, 2, 6])
META = torch.zeros(2, 2, 6, 8, device="meta")


def dense(q=Q, k=K, v=K, **options):
    return lambda: attention(q, k, v, **options)


def packed(q=PQ, k=PK, v=PK, cu_q=CU_Q, cu_k=CU_K, max_q=3, max_k=4, **options):
    return lambda: attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, **options)


class BlockMask:
    """Stands in for torch.nn.attention.flex_attention's, which is recognised by name."""


MISTAKES = {
    # kinds and ranks
    "query_list": (dense(q=[1.0]), TypeError, "query is list: must be a torch.Tensor of shape (batch, heads, seqlen, head_dim)"),
    "key_none": (dense(k=None), TypeError, "key is NoneType: must be a torch.Tensor"),
    "value_array": (dense(v=2.0), TypeError, "value is float: must be a torch.Tensor"),
    "query_rank": (dense(q=Q[0]), ValueError, "query has shape (4, 5, 8): must have 4 dimensions, (batch, heads, seqlen, head_dim)"),
    "key_rank_bshd": (dense(k=K[0], layout="bshd"), ValueError, "must have 4 dimensions, (batch, seqlen, heads, head_dim)"),
    "packed_rank": (packed(q=PQ[None]), ValueError, "query has shape (1, 5, 4, 8): must have 3 dimensions, (total, heads, head_dim)"),
    "dtype": (dense(k=K.half()), ValueError, "query is torch.float32 and key is torch.float16: query, key and value must have one dtype"),
    "dtype_value": (dense(v=K.bfloat16()), ValueError, "query is torch.float32 and value is torch.bfloat16"),
    "dtype_kind": (
        dense(Q.int(), K.int(), K.int()), TypeError,
        "query, key and value are torch.int32: allowed are torch.float16, torch.bfloat16",
    ),
    "device": (dense(k=META), ValueError, "query is on cpu and key is on meta: all tensors must be on one device"),
    # sizes
    "batch_key": (
        dense(k=K[:1], v=K[:1]), ValueError,
        "query has shape (2, 4, 5, 8) and key has shape (1, 2, 6, 8): they must have one batch size",
    ),
    "batch_value": (
        dense(v=K[:1]), ValueError,
        "query has shape (2, 4, 5, 8) and value has shape (1, 2, 6, 8): they must have one batch size",
    ),
    "keys": (
        dense(v=K[:, :, :3]), ValueError,
        "key has shape (2, 2, 6, 8) and value has shape (2, 2, 3, 8): key and value must have one sequence",
    ),
    "keys_packed": (
        packed(v=PK[:3]), ValueError,
        "key has shape (6, 2, 8) and value has shape (3, 2, 8): key and value must have one sequence",
    ),
    "heads_value": (
        dense(v=K[:, :1]), ValueError,
        "key has shape (2, 2, 6, 8) and value has shape (2, 1, 6, 8): key and value must have the same",
    ),
    "head_dim": (
        dense(q=Q[..., :4]), ValueError,
        "query has shape (2, 4, 5, 4) and key has shape (2, 2, 6, 8): query and key must have one head_dim",
    ),
    "heads": (dense(q=Q[:, :3]), ValueError, "query has 3 heads and key has 2: the first must be a multiple of the second"),
    "heads_fewer": (dense(q=Q[:, :1]), ValueError, "query has 1 heads and key has 2: the first must be a multiple of the second"),
    "heads_none": (dense(k=K[:, :0], v=K[:, :0]), ValueError, "query has 4 heads and key has 0"),
    "heads_bshd": (dense(layout="bshd"), ValueError, "query has 5 heads and key has 6"),
    "head_dim_0": (dense(Q[..., :0], K[..., :0]), ValueError, "query has head_dim 0: allowed are 1 to 256"),
    "head_dim_257": (
        dense(torch.zeros(2, 4, 5, 257), torch.zeros(2, 2, 6, 257)), ValueError,
        "query has head_dim 257: allowed are 1 to 256",
    ),
    "head_dim_v": (dense(v=torch.zeros(2, 2, 6, 300)), ValueError, "value has head_dim 300: allowed are 1 to 256"),
    # options
    "layout": (dense(layout="sbhd"), ValueError, "layout='sbhd': allowed are 'bhsd' and 'bshd'"),
    "causal": (dense(causal="left"), ValueError, "causal='left': allowed are False, True, 'bottom_right', 'top_left'"),
    "causal_int": (dense(causal=1), ValueError, "causal=1: allowed are"),
    "window_int": (dense(window=3), ValueError, "window=3: must be (left, right), each an integer >= 0 or None"),
    "window_three": (dense(window=(1, 2, 3)), ValueError, "window=(1, 2, 3): must be (left, right)"),
    "window_negative": (dense(window=(-1, 0)), ValueError, "window=(-1, 0): each reach must be an integer >= 0, or None for unbounded"),
    "window_float": (dense(window=(1.5, 0)), ValueError, "window=(1.5, 0): each reach must be an integer"),
    "window_bool": (dense(window=(True, 0)), ValueError, "window=(True, 0): each reach must be an integer"),
    "scale_text": (dense(scale="1"), TypeError, "scale='1': must be a number"),
    "scale_bool": (dense(scale=True), TypeError, "scale=True: must be a number"),
    "scale_tensor": (dense(scale=torch.tensor(1.0)), TypeError, "scale=tensor(1.): must be a number"),
    "scale_nan": (dense(scale=math.nan), ValueError, "scale=nan: must be finite"),
    "scale_inf": (dense(scale=-math.inf), ValueError, "scale=-inf: must be finite"),
    "softcap_negative": (dense(softcap=-1.0), ValueError, "softcap=-1.0: must be positive; None or 0 turns it off"),
    "softcap_inf": (dense(softcap=math.inf), ValueError, "softcap=inf: must be finite"),
    "dropout": (dense(dropout_p=0.1), NotImplementedError, "dropout_p=0.1: dropout is not implemented; pass 0.0 (in evaluation too)"),
    "dropout_range": (dense(dropout_p=1.5), ValueError, "dropout_p=1.5: must be a probability"),
    "dropout_text": (dense(dropout_p="no"), ValueError, "dropout_p='no': must be a probability"),
    "backend": (dense(backend="cuda"), ValueError, "backend='cuda': allowed are 'triton', 'hip', 'cpu' or None for the best that can run"),
    "unknown": (dense(is_causal=True), TypeError, "unexpected keyword argument 'is_causal'"),
    "unknown_explain": (lambda: explain(Q, K, K, is_causal=True), TypeError, "explain() got an unexpected keyword argument 'is_causal'"),
    # optional tensors
    "bias_number": (dense(bias=1.0), TypeError, "bias is float: must be a floating point tensor"),
    "bias_bool": (
        dense(bias=torch.ones(5, 6, dtype=torch.bool)), TypeError,
        "bias is torch.bool: allowed are torch.float16, torch.bfloat16, torch.float32, torch.float64; a boolean mask goes to mask=",
    ),
    "bias_int": (dense(bias=torch.ones(5, 6, dtype=torch.int32)), TypeError, "bias is torch.int32: allowed are"),
    "bias_float64": (
        dense(bias=torch.ones(5, 6, dtype=F64)), TypeError,
        "bias is torch.float64 and query is torch.float32: a float64 bias needs float64 inputs",
    ),
    "bias_shape": (
        dense(bias=torch.zeros(6, 5)), ValueError,
        "bias has shape (6, 5): must broadcast to (batch, query heads, query length, key length) = (2, 4, 5, 6)",
    ),
    "bias_heads": (dense(bias=torch.zeros(2, 1, 1)), ValueError, "bias has shape (2, 1, 1): must broadcast"),
    "bias_rank": (dense(bias=torch.zeros(1, 1, 1, 5, 6)), ValueError, "bias has shape (1, 1, 1, 5, 6): must broadcast"),
    "bias_device": (dense(bias=META), ValueError, "query is on cpu and bias is on meta"),
    "mask_float": (
        dense(mask=torch.zeros(5, 6)), TypeError,
        "mask is torch.float32: must be torch.bool, True = may attend; an additive mask goes to bias=",
    ),
    "mask_list": (dense(mask=[True]), TypeError, "mask is list: must be a boolean tensor"),
    "mask_block": (
        dense(mask=BlockMask()), NotImplementedError,
        "mask is a BlockMask: block masks are not implemented; pass a boolean tensor",
    ),
    "mask_shape": (dense(mask=torch.ones(2, 3, 5, 6, dtype=torch.bool)), ValueError, "mask has shape (2, 3, 5, 6): must broadcast to"),
    "mask_device": (dense(mask=META > 0), ValueError, "query is on cpu and mask is on meta"),
    "slopes_number": (dense(alibi_slopes=0.5), TypeError, "alibi_slopes is float: must be a floating point tensor"),
    "slopes_int": (dense(alibi_slopes=torch.ones(4, dtype=torch.int64)), TypeError, "alibi_slopes is torch.int64: must be floating point"),
    "slopes_shape": (
        dense(alibi_slopes=torch.ones(2)), ValueError,
        "alibi_slopes has shape (2,): allowed are (query heads,) = (4,) and (batch, query heads) = (2, 4)",
    ),
    "slopes_grad": (
        dense(alibi_slopes=torch.ones(4, requires_grad=True)), NotImplementedError,
        "alibi_slopes requires a gradient, which is not implemented: pass alibi_slopes.detach(), or bias=",
    ),
    "slopes_device": (dense(alibi_slopes=torch.ones(4, device="meta")), ValueError, "query is on cpu and alibi_slopes is on meta"),
    "sinks_number": (dense(sinks=0.5), TypeError, "sinks is float: must be a floating point tensor"),
    "sinks_int": (dense(sinks=torch.ones(4, dtype=torch.int64)), TypeError, "sinks is torch.int64: must be floating point"),
    "sinks_shape": (dense(sinks=torch.ones(2)), ValueError, "sinks has shape (2,): must be (query heads,) = (4,)"),
    "sinks_device": (dense(sinks=torch.ones(4, device="meta")), ValueError, "query is on cpu and sinks is on meta"),
    # packed
    "cu_list": (packed(cu_q=[0, 2, 5]), TypeError, "cu_seqlens_q is list: must be an int32 or int64 tensor of shape (sequences + 1,)"),
    "cu_float": (packed(cu_k=CU_K.float()), TypeError, "cu_seqlens_k is torch.float32: allowed are torch.int32 and torch.int64"),
    "cu_rank": (packed(cu_q=CU_Q[None]), ValueError, "cu_seqlens_q has shape (1, 3): must be (sequences + 1,)"),
    "cu_empty": (packed(cu_q=CU_Q[:0]), ValueError, "cu_seqlens_q has shape (0,): must be (sequences + 1,)"),
    "cu_stride": (packed(cu_q=torch.zeros(6, dtype=torch.int32)[::2]), ValueError, "cu_seqlens_q has stride 2: must be contiguous"),
    "cu_device": (packed(cu_k=CU_K.to("meta")), ValueError, "query is on cpu and cu_seqlens_k is on meta"),
    "cu_disagree": (
        packed(cu_k=CU_K[:2]), ValueError,
        "cu_seqlens_q has shape (3,) and cu_seqlens_k has shape (2,): they must describe the same sequences",
    ),
    "cu_beyond": (packed(cu_q=CU_Q + 1), ValueError, "cu_seqlens_q runs from 1 to 6 and query has 5 rows: it must stay within 0 to 5"),
    "cu_below": (packed(cu_k=CU_K - 1), ValueError, "cu_seqlens_k runs from -1 to 5 and key has 6 rows: it must stay within 0 to 6"),
    "cu_falls": (packed(cu_q=torch.tensor([0, 4, 2])), ValueError, "cu_seqlens_q falls from 4 to 2 at sequence 1: it must not decrease"),
    "max_low": (
        packed(max_q=2, validate=True), ValueError,
        "cu_seqlens_q has a sequence of 3 rows and max_seqlen_q is 2: it must be at least as long",
    ),
    "max_low_k": (packed(max_k=3, validate=True), ValueError, "cu_seqlens_k has a sequence of 4 rows and max_seqlen_k is 3"),
    "max_negative": (packed(max_q=-1), ValueError, "max_seqlen_q=-1: must be an integer >= 0"),
    "max_float": (packed(max_k=4.0), ValueError, "max_seqlen_k=4.0: must be an integer >= 0"),
    "max_bool": (packed(max_k=True), ValueError, "max_seqlen_k=True: must be an integer >= 0"),
    "slopes_packed": (
        packed(alibi_slopes=torch.ones(3, 4)), ValueError,
        "allowed are (query heads,) = (4,) and (batch, query heads) = (2, 4)",
    ),
    "bias_packed": (
        packed(bias=torch.zeros(5, 6)), ValueError,
        "must broadcast to (batch, query heads, query length, key length) = (2, 4, 3, 4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_what_disagrees(name):
    call, kind, message = MISTAKES[name]
    with pytest.raises(kind, match=re.escape(message)) as caught:
        call()
    assert caught.type is kind


def test_the_right_calls_next_to_the_mistakes():
    """What the mistakes are variations of is accepted."""
    assert dense()().shape == (2, 4, 5, 8) and packed(validate=True)().shape == (5, 4, 8)
    assert dense(dropout_p=0, window=[None, None], softcap=0, scale=1, causal="bottom_right")().shape == (2, 4, 5, 8)
    assert dense(alibi_slopes=torch.ones(2, 4))().shape == (2, 4, 5, 8)
    with torch.no_grad():
        dense(alibi_slopes=torch.ones(4, requires_grad=True))()


def test_a_mistake_after_a_right_call_is_still_found():
    """Checked calls are remembered by everything that the checks look at."""
    q, k, v = qkv()
    attention(q, k, v)
    for wrong in (dict(scale=math.nan), dict(window=(-1, 0)), dict(layout="xyz"), dict(backend="cuda"), dict(dropout_p=0.5)):
        with pytest.raises((ValueError, NotImplementedError)):
            attention(q, k, v, **wrong)
    with pytest.raises(ValueError):
        attention(q, k, v[:, :, :5])
    with pytest.raises(ValueError):
        attention(q, k.double(), v)


def test_public_names():
    assert all(hasattr(portable_flash, name) for name in portable_flash.__all__)
    assert set(reference.GRADIENTS) == {"query", "key", "value", "bias", "sinks"}


def test_rows_too_far_apart_for_32_bit_offsets_are_copied():
    far = torch.empty_strided((1, 1, 3, 8), (1, 1, functional.MAX_ROW_STRIDE, 1))
    near = torch.empty_strided((1, 1, 3, 8), (1, 1, functional.MAX_ROW_STRIDE - 1, 1))
    assert functional._addressable(near, "bhsd") is near
    assert functional._addressable(far, "bhsd").stride() == (24, 24, 8, 1)
    assert functional._addressable(far.transpose(1, 2), "bshd").is_contiguous()
