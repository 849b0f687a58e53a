"""What torch sees of an attention call: autograd, fake tensors, compilation, export, modes, hooks and checkpoints."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from calls import Case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import portable_flash
from portable_flash import attention, attention_varlen, backends, ops, reference

NAMES = ("query", "key", "value", "bias", "sinks")
PACKED = dict(lengths=((9, 14), (0, 3), (11, 0), (5, 20)), unused=3)
CASES = {
    "plain": Case(heads_k=1, seqlen_q=9, seqlen_k=13),
    "causal": Case(heads_k=1, seqlen_q=9, seqlen_k=13, causal=True, layout="bshd"),
    "everything": Case(
        heads_k=1, seqlen_q=9, seqlen_k=13, window=(8, 2), softcap=2.0, bias="hqk", mask="bk", alibi="bh", sinks=True, head_dim_v=8
    ),
    "packed": Case(**PACKED, heads_k=1, causal=True),
    "packed_everything": Case(**PACKED, heads_k=1, window=(8, 2), softcap=2.0, bias="hqk", mask="bk", alibi="h", sinks=True, head_dim_v=8),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def leaves_of(call):
    return {name: getattr(call, name).clone().requires_grad_() for name in NAMES if getattr(call, name) is not None}


def operator_arguments(call, requires_grad=True):
    """Those of the forward operator, in its plain form."""
    p, case = call.problem, call.case
    leaf = lambda t: None if t is None else t.clone().requires_grad_(requires_grad)
    inputs = call.inputs()
    return (
        leaf(call.query), leaf(call.key), leaf(call.value), leaf(call.bias), inputs.alibi_slopes, leaf(call.sinks), call.mask,
        call.cu_seqlens_q, call.cu_seqlens_k, p.seqlen_q, p.seqlen_k, -1 if p.window_left is None else p.window_left,
        -1 if p.window_right is None else p.window_right, p.top_left, inputs.scale, inputs.softcap, case.layout, False, "",
    )  # fmt: skip


# ------------------------------------------------------------------ the operators
@pytest.mark.parametrize("name", CASES)
def test_opcheck_forward(name):
    torch.library.opcheck(ops.forward_op, operator_arguments(CASES[name].draw()))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("needs", [(True, True, True, True, True), (False, True, False, False, False)])
def test_opcheck_backward(name, needs):
    call = CASES[name].draw()
    arguments = operator_arguments(call, requires_grad=False)
    needs = [need and getattr(call, n) is not None for n, need in zip(NAMES, needs)]
    out, lse = ops.forward_op(*arguments)
    torch.library.opcheck(ops.backward_op, (call.grad_out, call.grad_lse, out, lse, *arguments, needs))


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    """Numerical derivatives in float64, of output and lse, by every input that has a gradient."""
    case = CASES[name]
    call = Case(**{**vars(case), "dtype": torch.float64, "head_dim": 3, "head_dim_v": 2}).draw()
    if call.bias is not None:  # -inf has no numerical derivative: it goes to the mask's side
        call.bias.masked_fill_(call.bias == -torch.inf, 0.5)
    leaves = leaves_of(call)

    def f(*tensors):
        out, lse = call.attention(**dict(zip(leaves, tensors, strict=True)))
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(f, tuple(leaves.values()), fast_mode=True)


def test_gradcheck_slow():
    call = Case(batch=1, heads_k=1, seqlen_q=3, seqlen_k=4, head_dim=2, dtype=torch.float64, bias="qk", sinks=True, softcap=1.0).draw()
    call.bias.nan_to_num_(neginf=0.3)
    leaves = leaves_of(call)
    assert torch.autograd.gradcheck(lambda *ts: call.attention(**dict(zip(leaves, ts, strict=True))), tuple(leaves.values()))


# ------------------------------------------------------------------ metadata
CONFIGURATIONS = list(
    itertools.product(
        ["bhsd", "bshd", "packed"], ["contiguous", "transposed", "expanded"], [(4, 2), (3, 3)],
        [torch.float32, torch.bfloat16, torch.float64], [(16, 16), (24, 8)],
    )
)


@pytest.mark.parametrize("layout, how, heads, dtype, widths", CONFIGURATIONS, ids=lambda x: str(x).replace("torch.", ""))
def test_fake_outputs_and_gradients_have_the_real_metadata(layout, how, heads, dtype, widths):
    sizes = dict(heads_k=heads[1], group=heads[0] // heads[1], head_dim=widths[0], head_dim_v=widths[1], dtype=dtype)
    call = Case(**sizes, **(PACKED if layout == "packed" else dict(layout=layout, seqlen_q=9, seqlen_k=13))).draw()
    dims = (0, 1) if layout == "packed" else (1, 2)
    if how == "transposed":
        tensors = {n: getattr(call, n).transpose(*dims).contiguous().transpose(*dims) for n in NAMES[:3]}
    elif how == "expanded":
        tensors = {n: getattr(call, n).narrow(dims[0], 0, 1).expand_as(getattr(call, n)) for n in NAMES[:3]}
    else:
        tensors = {n: getattr(call, n) for n in NAMES[:3]}

    def step(tensors):
        leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
        out, lse = call.attention(**leaves)
        return out, lse, *torch.autograd.grad((out.sum() + lse.sum()), list(leaves.values()))

    real = step(tensors)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = step({n: mode.from_tensor(t) for n, t in tensors.items()})
    describe = lambda ts: [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in ts]
    assert describe(fake) == describe(real)


# ------------------------------------------------------------------ compilation and export
def compare_compiled(f, make_leaves, **options):
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, **options)
    for leaves in make_leaves:
        expected, actual = f(*leaves), compiled(*leaves)
        torch.testing.assert_close(actual, expected)
        weights = [torch.linspace(-1, 1, t.numel()).view(t.shape).to(t.dtype) for t in expected]
        grads = lambda outputs: torch.autograd.grad([torch.where(t == -torch.inf, 0.0, t) for t in outputs], leaves, weights)
        torch.testing.assert_close(grads(actual), grads(expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_compile(name, backend):
    call = CASES[name].draw()
    leaves = leaves_of(call)
    f = lambda *tensors: call.attention(**dict(zip(leaves, tensors, strict=True)))
    compare_compiled(f, [tuple(leaves.values())], backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_dynamic_sizes(backend):
    """One graph for all batches and lengths: the window and the sizes are symbols."""
    f = lambda q, k, v: attention(q, k, v, causal=True, window=(q.shape[2] // 2, None), return_lse=True)
    draw = lambda b, s: tuple(leaves_of(Case(batch=b, seqlen_q=s, seqlen_k=s + 3).draw()).values())
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compare_compiled(f, [draw(3, 10), draw(5, 17), draw(7, 31)], backend=backend, dynamic=True)


def test_compile_dynamic_packed():
    def f(q, k, v, cu, longest):
        return attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ([3, 5, 2], [7, 1, 9, 4], [8]):
        call = Case(lengths=tuple((n, n) for n in lengths)).draw()
        arguments = (call.query, call.key, call.value, call.cu_seqlens_q, max(lengths))
        torch.testing.assert_close(compiled(*arguments), f(*arguments))


def test_compile_with_a_forced_backend():
    call = CASES["causal"].draw()
    call.options["backend"] = "cpu"
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call.attention, fullgraph=True, backend="eager")(), call.attention())


def test_compiled_argument_errors_are_the_eager_ones():
    q, k = torch.zeros(1, 3, 4, 16), torch.zeros(1, 2, 4, 16)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="query has 3 heads and key has 2"):
        torch.compile(lambda: attention(q, k, k), fullgraph=True, backend="eager")()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True, softcap=3.0)

    call = CASES["plain"].draw()
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in "qkv"}
    q = call.query[:, :, :9]
    exported = torch.export.export(Module(), (q, q, q), dynamic_shapes=shapes, strict=strict)
    calls = [n for n in exported.graph.nodes if "portable_flash" in str(n.target)]
    assert [str(n.target) for n in calls] == ["portable_flash.attention_forward.default"]
    longer = torch.cat([q, q, q], 2)
    torch.testing.assert_close(exported.module()(longer, longer, longer), Module()(longer, longer, longer))


# ------------------------------------------------------------------ autocast, checkpoints, hooks
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled):
    call = CASES["everything"].draw()
    leaves = leaves_of(call)

    def f(*tensors):
        with torch.autocast("cpu", torch.bfloat16):
            return call.attention(**dict(zip(leaves, tensors, strict=True)))

    torch._dynamo.reset()
    out, lse = (torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f)(*leaves.values())
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    narrow = [t.detach().bfloat16().requires_grad_() for t in list(leaves.values())[:3]]
    expected = call.attention(**leaves | dict(zip(NAMES, narrow)))[0]
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.float().square().sum(), list(leaves.values()))
    assert [g.dtype for g in grads] == [t.dtype for t in leaves.values()]
    expected_grads = torch.autograd.grad(expected.float().square().sum(), narrow)
    torch.testing.assert_close(grads[:3], tuple(g.float() for g in expected_grads))


def test_autocast_leaves_float64_alone():
    q = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q).dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["everything", "packed"])
def test_checkpoint(name, use_reentrant):
    call = CASES[name].draw()
    leaves = leaves_of(call)
    f = lambda *tensors: call.attention(**dict(zip(leaves, tensors, strict=True)))
    grads = lambda outputs: torch.autograd.grad(outputs, list(leaves.values()), (call.grad_out, call.grad_lse))
    expected = grads(f(*leaves.values()))
    if use_reentrant:  # works through backward() only
        out, lse = checkpoint(f, *leaves.values(), use_reentrant=True)
        torch.autograd.backward((out, lse), (call.grad_out, call.grad_lse))
        actual = tuple(t.grad for t in leaves.values())
    else:
        actual = grads(checkpoint(f, *leaves.values(), use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_selective_checkpoint_may_keep_the_operator():
    """A policy by operator works on compiled and traced calls, where the operator is what torch sees."""
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        return torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE

    call = CASES["causal"].draw()
    leaves = leaves_of(call)
    context = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)
    f = lambda *tensors: call.attention(**dict(zip(leaves, tensors, strict=True)))
    out, lse = checkpoint(f, *leaves.values(), use_reentrant=False, context_fn=context)
    actual = torch.autograd.grad((out, lse), list(leaves.values()), (call.grad_out, call.grad_lse))
    assert ops.forward_op in seen
    expected = torch.autograd.grad(f(*leaves.values()), list(leaves.values()), (call.grad_out, call.grad_lse))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_saved_tensors_pass_through_hooks():
    call = CASES["everything"].draw()
    leaves = leaves_of(call)
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    def unpack(t):
        unpacked.append(t.shape)
        return t

    expected = torch.autograd.grad(call.attention(**leaves), list(leaves.values()), (call.grad_out, call.grad_lse))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = call.attention(**leaves)
    for shape in (call.query.shape, call.key.shape, outputs[0].shape, outputs[1].shape, call.mask.shape):
        assert shape in packed
    assert not unpacked
    actual = torch.autograd.grad(outputs, list(leaves.values()), (call.grad_out, call.grad_lse))
    assert len(unpacked) == len(packed)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_save_on_cpu():
    call = CASES["causal"].draw()
    leaves = leaves_of(call)
    expected = torch.autograd.grad(call.attention(**leaves), list(leaves.values()), (call.grad_out, call.grad_lse))
    with torch.autograd.graph.save_on_cpu():
        outputs = call.attention(**leaves)
    actual = torch.autograd.grad(outputs, list(leaves.values()), (call.grad_out, call.grad_lse))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_saved_tensor_changed_in_place_is_an_error():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    x = q * 1.0
    out = attention(x, x, x)
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_module_and_gradient_hooks_fire():
    """What FSDP and DDP hang on to: forward hooks, full backward hooks, hooks after gradients accumulate."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.sinks = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x):
            q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
            return attention(q, k, v, layout="bshd", causal=True, sinks=self.sinks)

    layer, fired = Layer(), []
    layer.register_forward_pre_hook(lambda *_: fired.append("before forward"))
    layer.register_forward_hook(lambda *_: fired.append("after forward"))
    layer.register_full_backward_pre_hook(lambda *_: fired.append("before backward"))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: fired.append(("after backward", grad_in[0].shape)))
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"grad of {name}"))
    x = torch.randn(2, 5, 16, requires_grad=True)
    layer(x).sum().backward()
    assert fired[:3] == ["before forward", "after forward", "before backward"]
    assert set(fired[3:]) == {"grad of sinks", "grad of project.weight", "grad of project.bias", ("after backward", x.shape)}


# ------------------------------------------------------------------ double backward
@pytest.mark.parametrize("path", ["eager", "operator"])
def test_double_backward_is_refused(path):
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    if path == "eager":
        out = attention(q, k, v)
    else:
        call = Case(batch=1, heads_k=1, group=1, seqlen_q=4, seqlen_k=4, head_dim=8).draw()
        out = ops.forward_op(q, k, v, *operator_arguments(call)[3:])[0]
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward.*create_graph=True"):
        grad.sum().backward()


# ------------------------------------------------------------------ only what is needed
@pytest.fixture
def spy(monkeypatch):
    """Counts the CPU backend's runs, and what the backward ones were asked for."""
    module, record = backends.load("cpu"), SimpleNamespace(forward=0, needs=[])
    forward, backward = module.forward, module.backward

    def spy_forward(*args):
        record.forward += 1
        return forward(*args)

    def spy_backward(*args):
        record.needs.append({name for name in NAMES if getattr(args[-1], name)})
        return backward(*args)

    attention(*[torch.zeros(1, 1, 1, 1)] * 3)  # the probe has run
    monkeypatch.setattr(module, "forward", spy_forward)
    monkeypatch.setattr(module, "backward", spy_backward)
    return record


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sinks", "query sinks", " ".join(NAMES)])
@pytest.mark.parametrize("mode", ["eager", "operator"])
def test_gradients_only_of_what_asks_for_one(spy, wanted, mode):
    wanted = set(wanted.split())
    call = CASES["everything"].draw()
    leaves = {n: getattr(call, n).requires_grad_(n in wanted) for n in NAMES}
    with torch.profiler.profile() if mode == "operator" else warnings.catch_warnings():
        out, lse = call.attention(**leaves)
        torch.autograd.backward((out, lse), (call.grad_out, call.grad_lse))
    assert (spy.forward, spy.needs) == (1, [wanted])
    assert {n for n, t in leaves.items() if t.grad is not None} == wanted


@pytest.mark.parametrize("reason", ["no_grad", "inference_mode", "detached"])
def test_nothing_is_recorded_without_need(spy, reason):
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=reason != "detached") for _ in range(3))
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "detached": warnings.catch_warnings}[reason]
    for _ in range(2):  # checked, and remembered
        with context():
            out, lse = attention(q, k, v, return_lse=True)
        assert not out.requires_grad and not lse.requires_grad and out.grad_fn is None
    assert (spy.forward, spy.needs) == (2, [])


def test_gradient_through_lse_alone_and_output_alone(spy):
    call = CASES["causal"].draw()
    for index in (0, 1):
        leaves = leaves_of(call)
        outputs = call.attention(**leaves)
        grads = torch.autograd.grad(outputs[index].sum(), [leaves["query"], leaves["key"]])
        ones = torch.ones_like(outputs[index])
        zero = torch.zeros_like(outputs[0])
        _, _, expected = reference.differentiate(
            call.inputs(), call.problem, ones if index == 0 else zero, ones if index == 1 else None, ("query", "key")
        )
        torch.testing.assert_close(grads, (expected.query.float(), expected.key.float()), atol=1e-5, rtol=1e-4)
    assert len(spy.needs) == 2


# ------------------------------------------------------------------ modes and transforms
class Recorder(TorchDispatchMode):
    def __init__(self):
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators():
    leaves = leaves_of(CASES["causal"].draw())
    for _ in range(2):  # the second call would take the remembered plan
        with Recorder() as recorder:
            attention(*leaves.values(), layout="bshd").sum().backward()
        mine = [name for name in recorder.seen if "portable_flash" in name]
        assert mine == ["portable_flash.attention_forward.default", "portable_flash.attention_backward.default"]


def test_a_profiler_sees_the_operators():
    leaves = leaves_of(CASES["causal"].draw())
    with torch.profiler.profile() as profile:
        attention(*leaves.values(), layout="bshd").sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"portable_flash::attention_forward", "portable_flash::attention_backward"} <= names


def test_under_a_function_mode():
    """torch.set_default_device pushes one."""
    call = CASES["packed"].draw()
    expected = call.attention()
    with torch.device("cpu"):
        assert all(torch.equal(a, b) for a, b in zip(call.attention(), expected))


def test_tensor_subclass_reaches_the_operator():
    class Named(torch.Tensor):
        seen = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    q = torch.randn(1, 1, 4, 8).as_subclass(Named)
    out = attention(q, q, q)
    assert type(out) is Named and any("attention_forward" in name for name in Named.seen)


@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_functional_transforms_are_right_or_refused(transform):
    q, k, v = torch.randn(3, 3, 2, 2, 5, 8).unbind(0)
    f = lambda q, k, v: attention(q, k, v, causal=True)
    loss = lambda q: f(q, k[0], v[0]).square().sum()
    leaf = q[0].clone().requires_grad_()
    try:
        actual = torch.vmap(f)(q, k, v) if transform == "vmap" else torch.func.grad(loss)(q[0])
    except RuntimeError as error:  # torch.library's operators do not take part in torch.func, and say so
        assert any(word in str(error) for word in ("portable_flash", "functorch", "vmap"))
    else:
        each = [f(*x) for x in zip(q, k, v)]
        torch.testing.assert_close(actual, torch.stack(each) if transform == "vmap" else torch.autograd.grad(loss(leaf), leaf)[0])


def test_make_fx_traces_the_operators():
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(q, k, v):
        leaf = q.detach().requires_grad_()
        return torch.autograd.grad(attention(leaf, k, v).sum(), leaf)[0]

    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    graph = make_fx(step)(q, k, v)
    mine = [str(n.target) for n in graph.graph.nodes if "portable_flash" in str(n.target)]
    assert mine == ["portable_flash.attention_forward.default", "portable_flash.attention_backward.default"]
    torch.testing.assert_close(graph(q, k, v), step(q, k, v))


def test_remembered_call_equals_the_first():
    """The shortcut of repeated calls: same numbers, and a changed option is another call."""
    call = CASES["causal"].draw()
    q, k, v = call.query, call.key, call.value
    first = [attention(q, k, v, layout="bshd", scale=s, return_lse=True) for s in (None, 0.5, 0.0)]
    again = [attention(q, k, v, layout="bshd", scale=s, return_lse=True) for s in (None, 0.5, 0.0)]
    for a, b in zip(first, again):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(first[0][0], first[1][0]) and not torch.equal(first[1][0], first[2][0])
    assert portable_flash.attention(q, k, v, layout="bshd").shape == first[0][0].shape
