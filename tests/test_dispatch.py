"""Which backend runs: the order, the probe, the warning, the errors, and that a plan is made once."""

import warnings
from dataclasses import replace

import pytest
import torch

from portable_flash import NoBackendError, Tiling, attention, backends, dispatch, tuning
from portable_flash.backends import Gradients
from portable_flash.device import cpu, named
from portable_flash.problem import Problem

PROBLEM = Problem(torch.float16, batch=1, heads_q=2, heads_k=2, seqlen_q=64, seqlen_k=64, head_dim=32, head_dim_v=32)
H200, MI300X, RX6800 = named("h200"), named("mi300x"), named("rx6800")
real_load, CPU = backends.load, backends.load("cpu")


class Fake:
    """A backend that computes like the CPU one, then does `spoil` to what it returns."""

    def __init__(self, name="fake", unavailable=None, supports=None, spoil=lambda out, lse, grads: (out, lse, grads)):
        self.NAME, self.spoil, self.runs = name, spoil, 0
        self.unavailable = lambda device: unavailable
        self.supports = lambda problem, device: supports

    def tuned_kernels(self, problem):
        return ()

    def space(self, kernel):
        return None

    def forward(self, inputs, plan):
        self.runs += 1
        out, lse = CPU.forward(inputs, plan)
        return self.spoil(out, lse, None)[:2]

    def backward(self, inputs, plan, out, lse, *rest):
        return self.spoil(out, lse, CPU.backward(inputs, plan, out, lse, *rest))[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is remembered from other tests, nor for them."""
    for name, empty in (("_PLANS", {}), ("_PROBED", {}), ("_WARNED", set())):
        monkeypatch.setattr(dispatch, name, empty)
    monkeypatch.setattr("portable_flash.functional._CHECKED", {})


@pytest.fixture
def install(monkeypatch):
    """Put fake backends before the CPU one (on the CPU the order is reversed, so they are named last first)."""

    def put(*fakes, cpu_too=True):
        by_name = {fake.NAME: fake for fake in fakes}
        names = (*by_name, *(["cpu"] if cpu_too else []))
        monkeypatch.setattr(backends, "NAMES", tuple(reversed(names)))
        load = lambda name: by_name[name] if name in by_name else real_load(name)
        monkeypatch.setattr(backends, "load", load)
        monkeypatch.setattr("portable_flash.ops.load", load)
        monkeypatch.setattr("portable_flash.functional.NAMES", names)
        return fakes[0] if len(fakes) == 1 else fakes

    return put


def qkv():
    return [torch.randn(1, 2, 24, 16, generator=torch.Generator().manual_seed(s)) for s in range(3)]


# ------------------------------------------------------------------ order
def test_order():
    assert dispatch.order(H200) == ("triton", "cpu")
    assert dispatch.order(MI300X) == ("triton", "hip", "cpu")
    assert dispatch.order(cpu()) == ("cpu", "triton")


def test_hip_is_for_amd_where_triton_has_no_path():
    pytest.importorskip("triton")
    assert dispatch.plan(PROBLEM, MI300X).backend == "triton" and dispatch.plan(PROBLEM, MI300X, "hip").backend == "hip"
    found = dispatch.plan(PROBLEM, RX6800)
    assert found.backend == "hip" and [name for name, _ in found.rejected] == ["triton"]
    for device in (H200, cpu()):
        with pytest.raises(NoBackendError, match="hip: runs on AMD GPUs"):
            dispatch.plan(PROBLEM, device, "hip")


def present(device):
    return replace(device, index=0)


@pytest.mark.parametrize("reason", ["no path", "probe"])
def test_another_kernel_backend_is_silent_unless_the_first_is_broken(install, monkeypatch, reason):
    """A GPU that only the second kernel backend serves is served as intended; a failed probe is news."""
    install(Fake("first", unavailable="has no path for this" if reason == "no path" else None), Fake("second"))
    monkeypatch.setattr(dispatch, "order", lambda device: ("first", "second", "cpu"))
    monkeypatch.setattr(dispatch, "probe", lambda name, device: "is wrong" if (name, reason) == ("first", "probe") else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert dispatch.plan(PROBLEM, present(MI300X)).backend == "second"
    expected = ["portable_flash runs this call on its 'second' backend: first is wrong"] if reason == "probe" else []
    assert [str(w.message) for w in caught] == expected


def test_the_first_that_can_run_does(install):
    fake = install(Fake())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*qkv())
    assert fake.runs == 2  # the probe and the call
    assert dispatch.plan(PROBLEM, cpu()).backend == "fake" and dispatch.plan(PROBLEM, cpu()).rejected == ()


@pytest.mark.parametrize("reason", [dict(unavailable="is not installed"), dict(supports="has no such kernel")])
def test_fallback_warns_once_with_the_reason(install, reason):
    fake = install(Fake(**reason))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attention(*qkv())
        attention(*qkv(), causal=True)
        attention(*(t[:, :, :9] for t in qkv()))
    (only,) = caught
    assert str(only.message) == f"portable_flash runs this call on its 'cpu' backend, a slower path: fake {next(iter(reason.values()))}"
    assert fake.runs == 0
    assert dispatch.plan(PROBLEM, cpu()).rejected == (("fake", next(iter(reason.values()))),)


# ------------------------------------------------------------------ probe
ZEROS = lambda out, lse, grads: (torch.zeros_like(out), lse, grads)
SPOILERS = {
    "zeros": (ZEROS, "out: fail"),
    "lse": (lambda out, lse, grads: (out, lse + 0.05, grads), "lse: fail"),
    "nan": (lambda out, lse, grads: (torch.full_like(out, torch.nan), lse, grads), "out: fail"),
    "dtype": (lambda out, lse, grads: (out.float(), lse, grads), "out: fail, dtype torch.float32"),
    "grad_query": (lambda out, lse, grads: (out, lse, grads and replace(grads, query=grads.query * 1.05)), "grad_query: fail"),
    "grad_key": (lambda out, lse, grads: (out, lse, grads and replace(grads, key=torch.zeros_like(grads.key))), "grad_key: fail"),
    "swapped": (lambda out, lse, grads: (out, lse, grads and replace(grads, key=grads.value, value=grads.key)), "grad_key: fail"),
    "no_causal": (lambda out, lse, grads: (out.flip(2), lse, grads), "out: fail"),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_the_probe_rejects_wrong_numbers(install, name):
    spoil, verdict = SPOILERS[name]
    install(Fake(spoil=spoil))
    with pytest.warns(UserWarning, match="'cpu' backend.*computed wrong numbers in its probe") as caught:
        out = attention(*qkv())
    assert len(caught) == 1 and verdict in str(caught[0].message)
    assert torch.equal(out, attention(*qkv(), backend="cpu"))


def test_the_probe_rejects_what_raises(install):
    def spoil(*_):
        raise RuntimeError("no kernel image is available")

    install(Fake(spoil=spoil))
    with pytest.warns(UserWarning, match="failed its probe on this device: RuntimeError: no kernel image is available"):
        attention(*qkv())


def test_the_probe_runs_once_for_a_device(install):
    fake = install(Fake())
    for n in (5, 7, 9):
        attention(*(t[:, :, :n] for t in qkv()))
    assert fake.runs == 4


def test_a_device_that_is_not_here_is_not_probed(install):
    fake = install(Fake(spoil=ZEROS))
    assert dispatch.plan(PROBLEM, H200).backend in ("fake", "cpu") and fake.runs == 0


@pytest.mark.parametrize("context", ["no_grad", "inference_mode", "autocast", "default_dtype", "fake_mode", "deterministic"])
def test_the_probe_is_independent_of_where_it_first_happens(context):
    from torch._subclasses.fake_tensor import FakeTensorMode

    contexts = {
        "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "fake_mode": FakeTensorMode, "default_dtype": warnings.catch_warnings, "deterministic": warnings.catch_warnings,
    }  # fmt: skip
    try:
        if context == "default_dtype":
            torch.set_default_dtype(torch.float64)
        if context == "deterministic":
            torch.use_deterministic_algorithms(True)
        with contexts[context]():
            assert dispatch.probe("cpu", cpu()) is None
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------ errors
def test_a_forced_backend_says_why_it_cannot(install):
    install(Fake(supports="has no such kernel"))
    with pytest.raises(NoBackendError, match=r"no backend can run this call on CPU \(cpu\):\n  fake: has no such kernel$"):
        attention(*qkv(), backend="fake")


def test_a_forced_backend_that_fails_its_probe_does_not_run(install):
    install(Fake(spoil=ZEROS))
    with pytest.raises(NoBackendError, match="fake: computed wrong numbers"):
        attention(*qkv(), backend="fake")


def test_one_error_lists_every_reason(install):
    refusing = Fake("first", unavailable="is not installed"), Fake("second", supports="has no such kernel")
    install(*refusing, Fake("third", spoil=ZEROS), cpu_too=False)
    with pytest.raises(NoBackendError) as caught:
        attention(*qkv())
    lines = str(caught.value).splitlines()
    assert lines[0] == "no backend can run this call on CPU (cpu):"
    assert lines[1:3] == ["  first: is not installed", "  second: has no such kernel"]
    assert lines[3].startswith("  third: computed wrong numbers in its probe on this device: out: fail")
    assert issubclass(NoBackendError, NotImplementedError)


def test_triton_without_interpreter_is_refused_on_the_cpu():
    pytest.importorskip("triton")
    with pytest.raises(NoBackendError, match="triton: the CPU needs Triton's interpreter"):
        attention(*qkv(), backend="triton")


# ------------------------------------------------------------------ plans are made once
def test_a_plan_is_one_dictionary_hit(install, monkeypatch):
    install(Fake())
    attention(*qkv())
    monkeypatch.setattr(dispatch, "_choose", lambda *_: pytest.fail("planned again"))
    monkeypatch.setattr("portable_flash.functional._CHECKED", {})  # past the shortcut of repeated calls
    attention(*qkv())
    assert len(dispatch._PLANS) == 1


def test_equal_problems_share_a_plan_and_others_do_not():
    plan = dispatch.plan(PROBLEM, cpu())
    assert dispatch.plan(replace(PROBLEM), cpu()) is plan
    assert dispatch.plan(replace(PROBLEM, seqlen_k=65), cpu()) is not plan
    assert dispatch.plan(PROBLEM, cpu(), "cpu") is not plan
    assert dispatch.plan(PROBLEM, H200) is not plan


def test_an_override_reaches_calls_that_are_remembered(install):
    """The shortcut of repeated calls holds a plan: inside a `tuning` block it must not be used, and after it again."""
    fake, seen = install(Fake()), []
    fake.tuned_kernels = lambda problem: ("forward",)
    forward = fake.forward
    fake.forward = lambda inputs, plan: seen.append(plan.kernels["forward"].tiling) or forward(inputs, plan)
    for _ in range(3):
        attention(*qkv())
    with tuning(forward=Tiling(128, 16)):
        attention(*qkv())
    attention(*qkv())
    assert seen[-2] == Tiling(128, 16) and seen[-1] == seen[-3] != Tiling(128, 16)


def test_memory_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 4)
    for n in range(1, 12):
        dispatch.plan(replace(PROBLEM, seqlen_k=n), cpu())
        assert len(dispatch._PLANS) <= 4


def test_gradients_come_from_the_planned_backend(install):
    """Forward and backward run on one backend, whatever is planned in between."""
    marked = lambda out, lse, grads: (out, lse, grads and Gradients(query=grads.query, key=grads.key, value=grads.value))
    fake = install(Fake(spoil=marked))
    leaves = [t.requires_grad_() for t in qkv()]
    out = attention(*leaves)
    calls = []
    backward = fake.backward
    fake.backward = lambda *args: calls.append(args[1].backend) or backward(*args)
    torch.autograd.grad(out.sum(), leaves)
    assert calls == ["fake"]
