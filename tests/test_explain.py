"""The report of a plan: what it must say, for a GPU that need not be there."""

import warnings

import pytest
import torch

from portable_flash import Tiling, attention, explain, tuning
from portable_flash.backends import load
from portable_flash.device import catalogue

pytest.importorskip("triton", reason="Triton is not installed")

Q, K = torch.zeros(2, 8, 512, 64, dtype=torch.bfloat16), torch.zeros(2, 2, 1024, 64, dtype=torch.bfloat16)


def gpu(device="mi300x", q=Q, k=K, *varlen, **options):
    return explain(q, k, k, *varlen, device=device, **options)


def test_on_the_cpu_it_tells_the_backend_and_the_work():
    report = explain(Q, K, K, causal=True)
    assert report.plan.backend == "cpu" and report.hbm_bytes == {}
    assert str(report).splitlines()[:2] == [
        "attention bf16: batch 2, heads 8/2, seqlen 512/1024, head_dim 64, causal on CPU (cpu)", "  backend: cpu",
    ]  # fmt: skip
    assert "forward: " in str(report) and "GFLOP" in str(report) and "backward" not in str(report)


def test_it_names_backend_kernels_tilings_sources_flops_and_bytes():
    report = gpu(needs_grad=True, causal=True)
    assert report.plan.backend == "triton" and report.plan.device.arch == "gfx942"
    lines = str(report).splitlines()
    assert lines[1] == "  backend: triton"
    for line, kernel in zip(lines[2:], ("forward", "backward_dkv", "backward_dq")):
        chosen = report.plan.kernels[kernel]
        assert line == f"  {kernel}: {chosen.tiling}  [{chosen.source}]" and "block_m=" in line and chosen.source
    pairs = 2 * 8 * sum(min(1024, i + 512 + 1) for i in range(512))
    assert report.flops == {"forward": 4 * pairs * 64, "backward": 10 * pairs * 64}
    for direction, line in zip(("forward", "backward"), lines[5:]):
        gflop, megabytes = report.flops[direction] / 1e9, report.hbm_bytes[direction] / 1e6
        assert line.startswith(f"  {direction}: {gflop:.4g} GFLOP, {megabytes:.4g} MB of HBM traffic predicted")
        assert f"(unfused: {report.unfused_hbm_bytes[direction] / 1e6:.4g} MB, " in line
    everything_once = Q.nbytes * 2 + K.nbytes * 2 + 2 * 8 * 512 * 4
    assert everything_once <= report.hbm_bytes["forward"] < report.unfused_hbm_bytes["forward"]


@pytest.mark.parametrize("slug", sorted(catalogue()))
def test_every_gpu_of_the_catalogue_has_a_plan(slug):
    report = gpu(slug, needs_grad=True)
    assert report.plan.device.slug == slug
    assert report.plan.backend == ("triton" if load("triton").unavailable(report.plan.device) is None else "hip")
    assert set(report.plan.kernels) == {"forward", "backward_dkv", "backward_dq"}
    for kernel, chosen in report.plan.kernels.items():
        unfit = getattr(load(report.plan.backend), "unfit", Tiling.unfit)
        assert unfit(chosen.tiling, kernel, report.plan.problem, report.plan.device) is None


def test_refusals_are_listed():
    wide = [t.double() for t in (Q, K)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing falls back: nothing runs
        report = gpu("mi300x", *wide)
    assert report.plan.backend == "cpu"
    reason = "computes fp16, bf16 and fp32, not fp64"
    assert str(report).splitlines()[-2:] == [f"  rejected triton: {reason}", f"  rejected hip: {reason}"]


@pytest.mark.parametrize("slug", ["rx6800", "mi50", "mi100", "rx5700xt"])
def test_gpus_that_only_hip_serves(slug):
    report = str(gpu(slug, needs_grad=True))
    assert report.splitlines()[1] == "  backend: hip" and "  rejected triton: has no path for gfx" in report
    assert "MB of HBM traffic predicted" in report


def test_an_explicit_tiling_is_reported_as_such():
    with tuning(forward=Tiling(64, 32, 4)):
        report = gpu()
    assert report.plan.kernels["forward"].source == "argument" and "forward: block_m=64 block_n=32" in str(report)
    assert gpu().plan.kernels["forward"].source != "argument"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(causal="top_left"), ", causal top-left"), (dict(window=(128, 0)), ", causal, window (128, 0)"),
        (dict(window=(None, 7)), "window (None, 7)"),
        (dict(softcap=30.0), ", softcap"), (dict(bias=torch.zeros(1024)), ", bias"),
        (dict(mask=torch.ones(1024, dtype=torch.bool)), ", mask"),
        (dict(alibi_slopes=torch.ones(8)), ", alibi"), (dict(sinks=torch.ones(8)), ", sinks"),
        (dict(deterministic=True), ", deterministic"),
        (dict(return_lse=True, validate=True), "head_dim 64"),
    ],
    ids=lambda x: None if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_the_title_names_the_options(options, words):
    assert words in str(gpu(**options)).splitlines()[0]


def test_packed():
    q, k, cu = Q[0].transpose(0, 1), K[0].transpose(0, 1), torch.tensor([0, 100, 512])
    report = gpu("h200", q, k, cu, cu, 412, 412, causal=True)
    assert "batch 2, heads 8/2, seqlen 412/412" in str(report) and ", varlen" in str(report).splitlines()[0]


def test_gradients_are_planned_where_tensors_ask():
    leaf = Q.clone().requires_grad_()
    assert set(gpu(q=leaf).flops) == {"forward", "backward"} and set(gpu(q=leaf, needs_grad=False).flops) == {"forward"}
    with torch.no_grad():
        assert set(gpu(q=leaf).flops) == {"forward"}


def test_it_runs_nothing_and_agrees_with_the_call(monkeypatch):
    from portable_flash.backends import load

    attention(*[torch.zeros(1, 1, 1, 1)] * 3)  # probed
    monkeypatch.setattr(load("cpu"), "forward", lambda *_: pytest.fail("ran"))
    explain(Q, K, K)


def test_mistakes_are_those_of_the_call():
    with pytest.raises(ValueError, match="query has 8 heads and key has 3"):
        explain(Q, K[:, :1].expand(2, 3, 1024, 64), K[:, :1].expand(2, 3, 1024, 64))
    with pytest.raises(ValueError, match="device 'mi9000': known are cpu, "):
        gpu("mi9000")
