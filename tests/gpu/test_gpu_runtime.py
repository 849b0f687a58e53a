"""What a GPU's runtime asks of a call: streams, graphs, compilation, sizes beyond 32 bits, memory, repeatability."""

import warnings

import pytest
import torch
from calls import Case, uninitialised_memory_is_nan

import portable_flash
from portable_flash import dispatch, reference
from portable_flash.backends import Gradients, Inputs
from portable_flash.problem import Problem

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
NAMES = ("query", "key", "value")


def results(call):
    out, lse, grads = call.run()
    return out, lse, *(g for g in (getattr(grads, name) for name in reference.GRADIENTS) if g is not None)


def draw(*shape, dtype=F16, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to("cuda", dtype)


# ------------------------------------------------------------------ repeatability
@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, seqlen_q=1024, seqlen_k=1024, heads_k=4, dtype=BF16),
        dict(seqlen_q=256, seqlen_k=32, head_dim=80, dtype=F32, causal=True),
        dict(seqlen_q=300, seqlen_k=203, bias="hk", sinks=True, dtype=BF16),
        dict(lengths=((130, 241), (0, 70), (345, 122)), dtype=F16, window=(50, 0)),
    ],
    ids=["causal", "float32", "bias", "packed"],
)
def test_thirty_runs_are_equal_bit_for_bit(options):
    call = Case(**{"head_dim": 64, **options}).draw("cuda")
    first = results(call)
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(results(call), first, strict=True))


# ------------------------------------------------------------------ graphs and streams
def test_graph_of_forward_and_backward():
    call = Case(seqlen_q=600, seqlen_k=600, head_dim=64, dtype=BF16, causal=True, sinks=True).draw("cuda")
    leaves = [getattr(call, name).clone().requires_grad_() for name in NAMES]

    def step():
        out, lse = portable_flash.attention(*leaves, causal=True, sinks=call.sinks, return_lse=True)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (call.grad_out, call.grad_lse))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            for i, leaf in enumerate(leaves):
                leaf.copy_(draw(*leaf.shape, dtype=BF16, seed=10 * seed + i))
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def test_first_call_of_a_shape_may_be_captured():
    """Kernels are compiled, the plan is not yet made: capture must neither synchronise nor remember an unproven plan."""
    q = draw(1, 2, 64, 64)
    portable_flash.attention(q, q, q)
    x = draw(3, 2, 64, 64, seed=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = portable_flash.attention(x, x, x)
    graph.replay()
    assert torch.equal(out, portable_flash.attention(x, x, x))


def test_current_stream_is_used():
    """Inputs are produced late on a side stream: a launch on any other stream would read what was there before."""
    shape = (2, 4, 512, 64)
    source = [draw(*shape, seed=s) for s in range(4)]
    q, k, v, grad = (torch.full_like(s, 7.0) for s in source)
    portable_flash.attention(*(s.requires_grad_() for s in source[:3])).backward(source[3])
    expected = [portable_flash.attention(*source[:3]), *(s.grad for s in source[:3])]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for t, s in zip((q, k, v, grad), source):
                t.copy_(s)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = portable_flash.attention(*leaves)
        actual = [out, *torch.autograd.grad(out, leaves, grad)]
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current():
    assert torch.cuda.current_device() == 0
    Case(seqlen_q=300, head_dim=64, dtype=F16, causal=True).draw("cuda:1").check()
    assert torch.cuda.current_device() == 0


# ------------------------------------------------------------------ compilation
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic):
    """Surrounded by operations that inductor fuses: no graph break, gradients of everything, and one graph for all lengths."""

    def model(q, k, v, bias, sinks):
        out, lse = portable_flash.attention(q * 1.0, k, v, causal=True, bias=bias, sinks=sinks, return_lse=True)
        return (out.float() * torch.cos(out.float())).sum() + lse.sin().sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for rows in (150, 170, 190) if dynamic else (150,):
        call = Case(seqlen_q=rows, seqlen_k=rows, head_dim=64, dtype=BF16, bias="hqk", sinks=True).draw("cuda")
        leaves = [getattr(call, name).requires_grad_() for name in (*NAMES, "bias", "sinks")]
        expected = torch.autograd.grad(model(*leaves), leaves)
        actual = torch.autograd.grad(compiled(*leaves), leaves)
        for a, b in zip(actual, expected, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()


def test_inductor_with_cuda_graphs():
    q = draw(2, 4, 256, 64).requires_grad_()
    model = torch.compile(lambda x: portable_flash.attention(x, x, x, causal=True) * 2, mode="reduce-overhead", fullgraph=True)
    expected = torch.autograd.grad((portable_flash.attention(q, q, q, causal=True) * 2).sum(), q)[0]
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        actual = torch.autograd.grad(model(q).sum(), q)[0].clone()
    assert (actual - expected).abs().max() <= 0.01 * expected.abs().max()


# ------------------------------------------------------------------ sizes
@pytest.mark.parametrize("shape", [(65536, 1, 4, 16), (1, 65540, 4, 16), (70000, 2, 1, 16)], ids=str)
def test_more_heads_than_a_grid_axis(shape):
    q, k, v, grad = (draw(*shape, seed=s).requires_grad_() for s in range(4))
    with uninitialised_memory_is_nan():
        out, lse = portable_flash.attention(q, k, v, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), grad)
    for at in (slice(0, 1), slice(-1, None)):
        part = lambda t: t.detach()[at, at]
        problem = Problem(F16, 1, 1, 1, shape[2], shape[2], 16, 16)
        inputs = Inputs(part(q), part(k), part(v), 16**-0.5)
        verdicts = reference.compare_call(inputs, problem, part(out), lse[at, at].detach(), Gradients(*map(part, grads)), part(grad))
        assert all(v.ok for v in verdicts), verdicts
    assert out.isfinite().all() and lse.isfinite().all() and all(g.isfinite().all() for g in grads)


def needs_memory(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GB of free GPU memory")


def test_more_elements_than_a_signed_32_bit_number():
    """query, output and their gradients have over 2**31 elements each; the last batches are beyond that offset."""
    batch, heads, rows, d = 16400, 16, 128, 64
    needs_memory(24)
    assert batch * heads * rows * d > 2**31
    unit = [draw(8, heads, rows, d, seed=s) for s in range(2)]
    q, grad = (u.repeat(batch // 8, 1, 1, 1) for u in unit)
    k, v = (draw(8, 1, rows, d, seed=s).repeat(batch // 8, 1, 1, 1) for s in (2, 3))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = portable_flash.attention(*leaves, causal=True, return_lse=True)
    grads = torch.autograd.grad(out, leaves, grad)
    problem = Problem(F16, 8, heads, 1, rows, rows, d, d, window_right=0)
    part = lambda t: t.detach()[-8:]
    inputs = Inputs(*map(part, leaves), d**-0.5)
    verdicts = reference.compare_call(inputs, problem, part(out), part(lse), Gradients(*map(part, grads)), part(grad))
    assert all(v.ok for v in verdicts), verdicts
    for t in (out, lse, *grads):  # batches repeat every 8: so must every result
        assert torch.equal(t[:8], t[-8:]) and torch.equal(t[:8], t[batch // 16 * 8 :][:8])


@pytest.mark.parametrize("stride", ["batch", "head", "row"])
def test_offsets_beyond_32_bits(stride):
    """Small tensors spread over a large buffer: the far rows, heads or batches lie beyond 2**31 elements."""
    needs_memory(12)
    rows, d = 200, 64
    buffer = torch.empty(2**31 + 2**27, dtype=F16, device="cuda")
    long = 2**31 // (rows - 8) // 8 * 8  # the last 8 rows are beyond
    far = {"batch": (2**31, rows * d, d), "head": (rows * d, 2**31, d), "row": (2 * d, d, long)}[stride]
    apart = 4 * d if stride == "row" else 2**22
    call = Case(batch=2, heads_k=2, group=1, seqlen_q=rows, seqlen_k=rows, head_dim=d, dtype=F16, causal=True).draw("cuda")
    expected = results(call)
    for i, name in enumerate((*NAMES, "grad_out")):
        view = buffer.as_strided((2, 2, rows, d), (*far, 1), i * apart)
        setattr(call, name, view.copy_(getattr(call, name)))
    assert max((n - 1) * s for n, s in zip(view.shape, view.stride())) >= 2**31
    for a, b in zip(results(call), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_memory_is_linear(head_dim):
    """Beyond the outputs and the gradients: 2% of the inputs, at a length where S would take 256 GB."""
    q, k, v, grad = (draw(1, 16, 65536, head_dim, dtype=BF16, seed=s).requires_grad_() for s in range(4))
    small = [t.detach()[:, :, :1024].requires_grad_() for t in (q, k, v)]
    portable_flash.attention(*small, causal=True).sum().backward()  # compiled and probed
    del small
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = portable_flash.attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    extra = torch.cuda.max_memory_allocated() - before
    size = lambda *ts: sum(t.numel() * t.element_size() for t in ts)
    assert extra <= size(out, *grads) + 0.02 * size(q, k, v, grad)


# ------------------------------------------------------------------ another backend
def test_float64_falls_back_with_one_warning(monkeypatch):
    monkeypatch.setattr(dispatch, "_WARNED", set())
    monkeypatch.setattr(dispatch, "_PLANS", {})
    case = Case(seqlen_q=61, seqlen_k=83, head_dim=24, dtype=torch.float64, causal=True, sinks=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.draw("cuda").check()
        Case(**{**case.__dict__, "seqlen_q": 62}).draw("cuda").check()
    ours = [str(w.message) for w in caught if "portable_flash" in str(w.message)]
    assert len(ours) == 1 and "'cpu' backend" in ours[0] and "not fp64" in ours[0]


def test_probe_under_deterministic_algorithms(monkeypatch):
    """A process that asks torch for determinism before its first call keeps its GPU kernels."""
    monkeypatch.setattr(dispatch, "_PROBED", {})
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")  # without it cuBLAS refuses deterministic mode
    with uninitialised_memory_is_nan():
        assert dispatch.probe("triton", dispatch.device_of(torch.device("cuda"))) is None
