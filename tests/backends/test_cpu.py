"""The CPU backend through the backend protocol: every option, alone and together, against the oracle."""

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from portable_flash import backends, reference
from portable_flash.backends import Gradients, Inputs, Needs, Plan
from portable_flash.backends.cpu import blocked
from portable_flash.device import Device
from portable_flash.problem import Problem

DEVICE = Device(slug="cpu", vendor="cpu", arch="cpu", name="cpu", compute_units=1)
cpu = backends.load("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    """More threads than work: on a busy machine they wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Many blocks and chunks from small tensors; sizes that no test shape is a multiple of."""
    monkeypatch.setattr(blocked, "ROWS", 24)
    monkeypatch.setattr(blocked, "KEYS", 20)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 3 * 24 * 20)


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call; `inputs` draws the tensors. bias and mask name those of (B, Hq, Sq, Sk) that are not 1."""

    batch: int = 2
    heads_k: int = 2
    group: int = 2
    seqlen_q: int = 50
    seqlen_k: int = 70
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "bhsd"
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    scale: float | None = None
    softcap: float = 0.0
    bias: str | None = None
    mask: str | None = None
    alibi: bool = False
    sinks: bool = False
    lengths: tuple[tuple[int, int], ...] | None = None  # (rows, keys) of each packed sequence
    unused: int = 0  # packed rows after the last sequence
    seed: int = 0

    def problem(self) -> Problem:
        packed = {}
        batch, seqlen_q, seqlen_k = self.batch, self.seqlen_q, self.seqlen_k
        if self.lengths is not None:
            rows, keys = [n for n, _ in self.lengths], [n for _, n in self.lengths]
            batch, seqlen_q, seqlen_k = len(self.lengths), max(rows, default=0), max(keys, default=0)
            packed = dict(varlen=True, total_q=sum(rows) + self.unused, total_k=sum(keys) + self.unused)
        return Problem(
            self.dtype, batch=batch, heads_q=self.heads_k * self.group, heads_k=self.heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v, window_left=self.left, window_right=self.right, top_left=self.top_left,
            softcap=bool(self.softcap), bias=self.bias is not None, mask=self.mask is not None, alibi=self.alibi, sinks=self.sinks,
            **packed,
        )  # fmt: skip

    def draw(self, generator, rows, heads, head_dim):
        if self.lengths is not None:
            shape = (rows, heads, head_dim)
        else:
            shape = (self.batch, heads, rows, head_dim) if self.layout == "bhsd" else (self.batch, rows, heads, head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def inputs(self) -> tuple[Inputs, Problem, torch.Tensor, torch.Tensor]:
        """Inputs, their problem, grad_out and grad_lse."""
        p, g = self.problem(), torch.Generator().manual_seed(self.seed)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        rows, keys = (p.total_q, p.total_k) if p.varlen else (p.seqlen_q, p.seqlen_k)
        full = dict(b=p.batch, h=p.heads_q, q=p.seqlen_q, k=p.seqlen_k)
        broadcast = lambda names: [n if name in names else 1 for name, n in full.items()]
        inputs = Inputs(
            query=self.draw(g, rows, p.heads_q, p.head_dim),
            key=self.draw(g, keys, p.heads_k, p.head_dim),
            value=self.draw(g, keys, p.heads_k, p.head_dim_v),
            scale=p.head_dim**-0.5 if self.scale is None else self.scale,
            softcap=self.softcap,
            layout=self.layout,
        )
        if self.bias is not None:
            inputs.bias = torch.randn(broadcast(self.bias), generator=g).to(self.dtype)
            inputs.bias[torch.rand(inputs.bias.shape, generator=g) < 0.1] = -torch.inf
        if self.mask is not None:
            inputs.mask = torch.rand(broadcast(self.mask), generator=g) < 0.7
        if self.alibi:
            inputs.alibi_slopes = torch.rand(p.batch, p.heads_q, generator=g).to(wide)
        if self.sinks:
            inputs.sinks = torch.randn(p.heads_q, generator=g).to(wide)
        if p.varlen:
            for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
                setattr(inputs, name, torch.tensor([0] + [n[side] for n in self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))
        grad_lse = torch.randn((p.heads_q, rows) if p.varlen else (p.batch, p.heads_q, rows), generator=g).to(wide)
        return inputs, p, self.draw(g, rows, p.heads_q, p.head_dim_v), grad_lse


EVERY_GRADIENT = Needs(bias=True, sinks=True)


def run(inputs: Inputs, problem: Problem, grad_out, grad_lse=None, needs: Needs = EVERY_GRADIENT):
    plan = Plan(problem=problem, device=DEVICE, backend="cpu")
    assert cpu.supports(problem, DEVICE) is None
    out, lse = cpu.forward(inputs, plan)
    return out, lse, cpu.backward(inputs, plan, out, lse, grad_out, grad_lse, needs)


def assert_right(inputs: Inputs, problem: Problem, grad_out, grad_lse=None):
    """Run forward and backward, judge everything, and return it."""
    out, lse, grads = run(inputs, problem, grad_out, grad_lse)
    for name in reference.GRADIENTS:
        tensor, gradient = getattr(inputs, name), getattr(grads, name)
        assert (gradient is None) == (tensor is None)
        assert gradient is None or gradient.is_contiguous()
    assert out.is_contiguous()
    wrong = [str(v) for v in reference.compare_call(inputs, problem, out, lse, grads, grad_out, grad_lse) if not v.ok]
    assert not wrong, "\n".join(wrong)
    return out, lse, grads


OPTIONS = {
    "plain": {},
    "causal": dict(right=0),
    "causal_more_queries": dict(right=0, seqlen_q=70, seqlen_k=50),
    "top_left": dict(right=0, top_left=True),
    "top_left_more_queries": dict(right=0, top_left=True, seqlen_q=70, seqlen_k=50),
    "window": dict(left=9, right=4),
    "window_left": dict(left=0, seqlen_q=70, seqlen_k=50),
    "window_right": dict(right=30),
    "window_top_left": dict(left=9, right=4, top_left=True),
    "window_unbounded": dict(left=2**31, right=2**31, seqlen_q=70, seqlen_k=50),
    "scale_zero": dict(scale=0.0),
    "scale_negative": dict(scale=-0.4),
    "scale_large": dict(scale=2.0),
    "softcap": dict(softcap=1.5, scale=1.0),
    "bias": dict(bias="bhqk"),
    "bias_head": dict(bias="hqk"),
    "bias_key": dict(bias="bk"),
    "bias_query": dict(bias="q"),
    "bias_scalar": dict(bias=""),
    "alibi": dict(alibi=True),
    "alibi_top_left": dict(alibi=True, right=0, top_left=True),
    "sinks": dict(sinks=True),
    "mask": dict(mask="bhqk"),
    "mask_key": dict(mask="bk"),
    "mask_query": dict(mask="q"),
    "scores": dict(softcap=1.5, scale=1.0, bias="bhqk", alibi=True),
    "hiding": dict(right=0, left=20, mask="bqk", bias="hk", sinks=True),
    "everything": dict(right=3, left=40, softcap=2.0, bias="hqk", alibi=True, sinks=True, mask="bhk"),
}
PACKED = dict(lengths=((30, 41), (0, 7), (26, 0), (1, 30), (45, 22), (0, 0), (13, 13)), unused=5)


@pytest.mark.parametrize("shape", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("options", OPTIONS)
def test_option(options, shape):
    options = dict(OPTIONS[options])
    if options.get("bias") == "":
        options["seed"] = 1  # one whose only element is not -inf
    case = Case(**options, **(PACKED if shape == "packed" else dict(layout=shape)))
    assert_right(*case.inputs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", ["plain", "causal", "sinks", "softcap", "everything"])
def test_dtype(options, dtype):
    out, lse, _ = assert_right(*Case(**OPTIONS[options], dtype=dtype, head_dim=32).inputs())
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_of_another_dtype(bias_dtype):
    inputs, *rest = Case(bias="qk", dtype=torch.bfloat16, head_dim=32).inputs()
    _, _, grads = assert_right(replace(inputs, bias=inputs.bias.to(bias_dtype)), *rest)
    assert grads.bias.dtype == bias_dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_p_rounds_to_the_input_dtype(dtype):
    """P = 1, exp(-1) and V = the rounded exp(-1), -1: the products cancel when P is rounded, and only then."""
    query, key = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([0.0, -1.0], dtype=dtype).view(1, 1, 2, 1)
    value = torch.tensor([math.exp(-1), -1.0], dtype=dtype).view(1, 1, 2, 1)
    problem = Case(batch=1, heads_k=1, group=1, seqlen_q=1, seqlen_k=2, head_dim=1, head_dim_v=1, dtype=dtype).problem()
    out, lse = cpu.forward(Inputs(query, key, value, scale=1.0), Plan(problem=problem, device=DEVICE, backend="cpu"))
    assert out.item() == 0
    assert lse.item() == pytest.approx(math.log(1 + math.exp(-1)))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 30])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_grouped_heads(group, layout):
    """At 30, a group has more query heads than a block has rows."""
    options = dict(right=0, bias="hqk", sinks=True, alibi=True)
    assert_right(*Case(group=group, layout=layout, seqlen_q=20, seqlen_k=33, **options).inputs())


@pytest.mark.parametrize("head_dims", [(1, 1), (7, 9), (8, 8), (64, 64), (96, 33), (192, 128), (256, 256), (1, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dim(head_dims, dtype):
    assert_right(*Case(head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype, batch=1).inputs())


@pytest.mark.parametrize("options", ["plain", "causal", "everything"])
def test_real_blocks(options, monkeypatch):
    monkeypatch.undo()
    torch.set_num_threads(2)
    assert_right(*Case(**OPTIONS[options] | dict(seqlen_q=530, seqlen_k=600, batch=1)).inputs())
    assert_right(*Case(**OPTIONS[options] | dict(seqlen_q=1, seqlen_k=1500, batch=1)).inputs())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_shapes(data):
    draw = lambda strategy: data.draw(strategy)
    reach = st.none() | st.integers(0, 70)
    sizes = st.integers(0, 60)
    options = dict(
        heads_k=draw(st.integers(1, 3)), group=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 40)), head_dim_v=draw(st.integers(1, 40)),
        left=draw(reach), right=draw(reach), top_left=draw(st.booleans()), softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        bias=draw(st.sampled_from([None, None, "bhqk", "qk", "bk", "h"])), mask=draw(st.sampled_from([None, None, "bhqk", "k", "bq"])),
        alibi=draw(st.booleans()), sinks=draw(st.booleans()), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip
    if draw(st.booleans()):
        options |= dict(lengths=tuple(draw(st.lists(st.tuples(sizes, sizes), max_size=4))), unused=draw(st.integers(0, 3)))
    else:
        options |= dict(batch=draw(st.integers(1, 3)), seqlen_q=draw(sizes), seqlen_k=draw(sizes))
        options |= dict(layout=draw(st.sampled_from(["bhsd", "bshd"])))
    assert_right(*Case(**options).inputs())


# ---------------------------------------------------------------- strides
def test_views_of_one_projection():
    """query, key and value as slices of one (B, S, 3, H, D) tensor."""
    inputs, problem, grad_out, grad_lse = Case(group=1, seqlen_k=50, layout="bshd", right=0).inputs()
    joint = torch.stack([inputs.query, inputs.key, inputs.value], 2)
    views = replace(inputs, **dict(zip(("query", "key", "value"), joint.unbind(2))))
    assert not views.key.is_contiguous()
    assert_right(views, problem, grad_out.transpose(1, 2).contiguous().transpose(1, 2), grad_lse)


def test_stride_zero():
    inputs, problem, grad_out, grad_lse = Case(bias="bhqk", seqlen_k=50).inputs()
    expanded = replace(inputs, key=inputs.key[:1, :1].expand(inputs.key.shape), bias=inputs.bias[:, :1].expand(inputs.bias.shape))
    assert_right(expanded, problem, grad_out[:1, :1].expand(grad_out.shape), grad_lse[..., :1].expand(grad_lse.shape))


# ---------------------------------------------------------------- what nothing sees
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(top_left=True, right=0, seqlen_q=30, seqlen_k=70),
        dict(right=0, seqlen_q=70, seqlen_k=30),
        dict(left=3, right=4, top_left=True, seqlen_q=30, seqlen_k=70),
        dict(mask="bhqk"),
        dict(mask="hqk", sinks=True, right=0, group=3),
        dict(bias="bqk"),
        dict(mask="bk", bias="q", left=20),
        dict(mask="qk", lengths=((30, 41), (26, 0), (0, 5), (45, 22)), unused=5),
    ],
)
def test_unseen_slots_may_hold_anything(options, dtype, number):
    case = Case(**options, dtype=dtype)
    inputs, problem, grad_out, grad_lse = case.inputs()
    if inputs.mask is not None and case.mask != "bk":
        inputs.mask[..., 3:6, :] = False
        inputs.mask[..., 11] = False
    if inputs.bias is not None:
        inputs.bias[..., 7:9, :] = -torch.inf
        if case.bias != "q":
            inputs.bias[..., 13] = -torch.inf
    clean = run(inputs, problem, grad_out, grad_lse)
    rows, keys = unseen(inputs, problem)
    assert rows.any() or keys.any()
    dirty = replace(
        inputs,
        query=inputs.query.masked_fill(rows, number),
        key=inputs.key.masked_fill(keys, number),
        value=inputs.value.masked_fill(keys, number),
    )
    out, lse, grads = run(dirty, problem, grad_out.masked_fill(rows, number), grad_lse)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])
    for name in reference.GRADIENTS:
        if getattr(inputs, name) is not None:
            assert torch.equal(getattr(grads, name), getattr(clean[2], name)), name


def unseen(inputs: Inputs, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see no key and keys that no row sees: the oracle's lse is -inf, and no gradient of O = PV reaches V."""
    call = replace(inputs, sinks=None)
    grad_out = torch.ones(*inputs.query.shape[:-1], problem.head_dim_v)
    _, lse, grads = reference.differentiate(call, problem, grad_out, None, ("value",))
    rows = lse == -torch.inf
    rows = rows.T[..., None] if problem.varlen else rows[..., None]
    return rows, grads.value[..., :1] == 0


def test_nan_bias_under_a_mask():
    inputs, problem, *rest = Case(bias="bhqk", mask="bhqk").inputs()
    expected = run(inputs, problem, *rest)
    inputs.bias[~inputs.mask] = math.nan
    out, lse, grads = run(inputs, problem, *rest)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and torch.equal(grads.bias, expected[2].bias)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("grad_number", [1.0, math.nan])
def test_rows_without_keys(sinks, grad_number):
    inputs, problem, grad_out, grad_lse = Case(right=0, seqlen_q=60, seqlen_k=25, sinks=sinks).inputs()
    if not sinks:
        grad_lse[:, :, :35] = grad_number
    out, lse, grads = run(inputs, problem, grad_out, grad_lse)
    assert not out[:, :, :35].any()
    assert not grads.query[:, :, :35].any()
    expected = inputs.sinks[:, None].expand(lse[:, :, :35].shape) if sinks else torch.full_like(lse[:, :, :35], -torch.inf)
    torch.testing.assert_close(lse[:, :, :35], expected)
    assert all(getattr(grads, n).isfinite().all() for n in ("query", "key", "value"))


def test_sink_of_minus_infinity_is_none():
    inputs, problem, grad_out, grad_lse = Case(sinks=True, mask="bhqk", seqlen_k=3).inputs()
    without = run(replace(inputs, sinks=None), problem, grad_out, grad_lse)
    out, lse, grads = run(replace(inputs, sinks=torch.full_like(inputs.sinks, -torch.inf)), problem, grad_out, grad_lse)
    assert torch.equal(out, without[0]) and torch.equal(lse, without[1]) and torch.equal(grads.key, without[2].key)
    assert not grads.sinks.any()


# ---------------------------------------------------------------- large numbers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_lowest_finite_bias_is_no_mask(dtype):
    """Every logit of the row rounds to the same number: the row is the mean of V, in the gradients too."""
    inputs, problem, grad_out, grad_lse = Case(bias="bhqk", dtype=dtype).inputs()
    inputs.bias.nan_to_num_(neginf=0.0)
    inputs.bias[:, :, 5] = torch.finfo(dtype).min
    inputs.bias[:, :, 6, ::2] = torch.finfo(dtype).min
    if dtype == torch.float16:  # scores still count beside -65504; not so beside the other types' lowest
        inputs.query[:, :, 5] = 0
    out, lse, _ = assert_right(inputs, problem, grad_out, grad_lse)
    assert lse.isfinite().all()
    mean = inputs.value.double().mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(out[:, :, 5:6].double(), mean, atol=2 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("magnitude", [1e2, 1e4, 1e8, 1e18, 1e25])
@pytest.mark.parametrize("options", [dict(), dict(right=0, bias="bhqk"), dict(softcap=30.0), dict(sinks=True)])
def test_huge_logits_stay_finite(options, magnitude):
    inputs, problem, grad_out, grad_lse = Case(**options).inputs()
    inputs.query *= magnitude
    inputs.key *= magnitude
    out, lse, grads = run(inputs, problem, grad_out, grad_lse)
    assert all(t.isfinite().all() for t in (out, lse, grads.value))
    expected, _ = reference.attend(inputs, problem)
    if magnitude >= 1e4 and not options.get("softcap"):  # one key takes all, and is exact
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    if magnitude <= 1e8:
        assert all(getattr(grads, n).isfinite().all() for n in ("query", "key"))


def test_scale_restores_huge_products():
    inputs, problem, *rest = Case().inputs()
    expected, *_ = run(inputs, problem, *rest)
    huge = replace(inputs, query=inputs.query * 2.0**70, key=inputs.key * 2.0**70, scale=inputs.scale * 2.0**-140)
    out, lse, grads = run(huge, problem, *rest)
    torch.testing.assert_close(out, expected)
    assert grads.key.isfinite().all()


def test_huge_values_stay_finite():
    inputs, problem, grad_out, grad_lse = Case().inputs()
    inputs.value.fill_(3e38)
    out, _, grads = run(inputs, problem, grad_out * 1e-3, None)
    torch.testing.assert_close(out, torch.full_like(out, 3e38))
    assert grads.query.isfinite().all() and grads.key.isfinite().all()


# ---------------------------------------------------------------- degenerate sizes
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "sizes",
    [dict(batch=0), dict(heads_k=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0), dict(seqlen_q=1, seqlen_k=1)],
)
@pytest.mark.parametrize("options", [dict(), dict(right=0, bias="bhqk", sinks=True, mask="qk", alibi=True)])
def test_degenerate_sizes(sizes, options, layout):
    inputs, problem, grad_out, grad_lse = Case(**sizes, **options, layout=layout).inputs()
    out, _, grads = assert_right(inputs, problem, grad_out, grad_lse)
    if not problem.seqlen_k:
        assert not out.any() and not grads.query.any()


@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((0, 5), (5, 0)), ((1, 1),)])
def test_degenerate_packed_sizes(lengths):
    assert_right(*Case(lengths=lengths, unused=2, sinks=True).inputs())


@pytest.mark.parametrize("bounds", [[0, 10, 1000], [-5, 10, 20], [0, 20, 10], [2**31 - 1, 0, 5], [7, 7, 7]])
def test_wrong_packed_bounds_stay_inside_the_tensors(bounds):
    inputs, problem, grad_out, grad_lse = Case(lengths=((10, 20), (10, 20)), mask="b").inputs()
    inputs.mask.fill_(True)
    inside = torch.tensor(bounds, dtype=torch.int32).clamp(0, 20)
    expected = run(replace(inputs, cu_seqlens_q=inside, cu_seqlens_k=inside), problem, grad_out, grad_lse)
    bad = torch.tensor(bounds, dtype=torch.int32)
    out, lse, grads = run(replace(inputs, cu_seqlens_q=bad, cu_seqlens_k=bad.clamp(max=20)), problem, grad_out, grad_lse)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and torch.equal(grads.key, expected[2].key)
    assert all(t.isfinite().all() for t in (out, grads.query, grads.key, grads.value))


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("name", [f.name for f in fields(Needs)])
def test_only_what_is_asked_for(name):
    inputs, problem, grad_out, grad_lse = Case(**OPTIONS["everything"]).inputs()
    _, _, everything = run(inputs, problem, grad_out, grad_lse)
    _, _, one = run(inputs, problem, grad_out, grad_lse, Needs(**{f.name: f.name == name for f in fields(Needs)}))
    assert torch.equal(getattr(one, name), getattr(everything, name))
    assert [f.name for f in fields(Gradients) if getattr(one, f.name) is not None] == [name]


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, problem, query, key, value, bias, sinks):
        inputs = replace(inputs, query=query, key=key, value=value, bias=bias, sinks=sinks)
        ctx.call = inputs, Plan(problem=problem, device=DEVICE, backend="cpu")
        ctx.results = cpu.forward(*ctx.call)
        return ctx.results

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        grads = cpu.backward(*ctx.call, *ctx.results, grad_out, grad_lse, EVERY_GRADIENT)
        return None, None, grads.query, grads.key, grads.value, grads.bias, grads.sinks


@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck(packed, monkeypatch):
    monkeypatch.setattr(blocked, "ROWS", 4)
    monkeypatch.setattr(blocked, "KEYS", 3)
    sizes = dict(lengths=((4, 5), (2, 0), (3, 4)), unused=1) if packed else dict(batch=1, seqlen_q=4, seqlen_k=5)
    options = dict(right=1, softcap=2.0, bias="hqk", alibi=True, sinks=True, scale=0.9)
    inputs, problem, _, _ = Case(**options, **sizes, heads_k=1, head_dim=3, head_dim_v=2, dtype=torch.float64).inputs()
    inputs.bias.nan_to_num_(neginf=0.0)
    leaves = [getattr(inputs, n).clone().requires_grad_() for n in reference.GRADIENTS]

    def call(*leaves):
        out, lse = Attention.apply(inputs, problem, *leaves)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(call, leaves)


def test_inputs_that_require_grad_are_left_alone():
    inputs, problem, grad_out, _ = Case(**OPTIONS["everything"]).inputs()
    inputs.query.requires_grad_()
    inputs.bias.requires_grad_()
    out, _, grads = run(inputs, problem, grad_out)
    assert not out.requires_grad and not grads.query.requires_grad


def test_repeats_bitwise():
    call = Case(**OPTIONS["everything"]).inputs()
    first, second = run(*call), run(*call)
    assert torch.equal(first[0], second[0]) and torch.equal(first[2].key, second[2].key) and torch.equal(first[2].bias, second[2].bias)


# ---------------------------------------------------------------- memory
class LargestTensor(TorchDispatchMode):
    """Elements of the largest storage that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("options", ["plain", "causal", "softcap", "alibi", "sinks"])
def test_memory_is_linear(options, monkeypatch):
    """No S or P, and no copy of K and V for each query head of a group."""
    monkeypatch.undo()
    inputs, problem, grad_out, grad_lse = Case(
        **OPTIONS[options] | dict(batch=1, heads_k=1, group=4, seqlen_q=2048, seqlen_k=2048, head_dim=4, head_dim_v=4)
    ).inputs()
    with LargestTensor() as seen:
        run(inputs, problem, grad_out, grad_lse)
    block = blocked.BLOCK_ELEMENTS * torch.get_num_threads()
    assert seen.elements <= max(block, inputs.query.numel())
    assert 8 * block <= problem.heads_q * problem.seqlen_q * problem.seqlen_k


def test_grouped_heads_share_keys():
    inputs, problem, grad_out, grad_lse = Case(batch=1, heads_k=1, group=8, seqlen_q=3, seqlen_k=2000).inputs()
    with LargestTensor() as seen:
        run(inputs, problem, grad_out, grad_lse)
    assert seen.elements <= inputs.key.numel()


# ---------------------------------------------------------------- protocol
def test_what_it_says_of_itself():
    problem = Case().problem()
    assert cpu.NAME == "cpu"
    assert cpu.unavailable(DEVICE) is None
    assert cpu.tuned_kernels(problem) == ()
    assert "257" in cpu.supports(replace(problem, head_dim=257), DEVICE)
    assert "512" in cpu.supports(replace(problem, head_dim_v=512), DEVICE)
    assert "int8" in cpu.supports(replace(problem, dtype=torch.int8), DEVICE)
