"""Speed against records: which calls, what is timed, the verdicts, and the comparison within a node. No GPU: times are told."""

import importlib
import sys
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from management_fakes import H200, Nvml, nvml_module, properties, torch_sees

from portable_flash import backends
from portable_flash.backends import Gradients, KernelPlan, Needs, Plan
from portable_flash.database import parse
from portable_flash.device import cpu
from portable_flash.tiling import Tiling
from portable_flash.tune.keys import Key
from portable_flash.validate import golden, identity, proofs, signals
from portable_flash.validate.checks import speed
from portable_flash.validate.checks.speed import LIMITS, compare_node
from portable_flash.validate.context import Context, Runner
from portable_flash.validate.report import Check, DeviceReport, Identity, Report, verdict_of

tuning = importlib.import_module("portable_flash.tuning")  # `portable_flash.tuning` is a function of that name
TILING = "{block_m: 64, block_n: 64, num_warps: 4, num_stages: 2}"
HEAD = """schema: 1
device: {slug: h200, vendor: nvidia, arch: sm_90, match: {pci_ids: ["10de:2335"], compute_units: %d},
  limits: {wave_size: 32, shared_memory_bytes: 232448, memory_gb: 141, l2_bytes: 62914560}}
measured_with: {triton: "%s", power_cap_w: 700}
kernels:
  triton:
"""


def entries(kernel: str, median: float, problem: str, space: str | None = None) -> str:
    space = space or backends.load("triton").space(kernel)
    proof = f'{{source: measured, problem: "{problem}", median_us: {median}}}'
    return (
        f'    {kernel}:\n      space: "{space}"\n      entries:\n        - when: {{dtype: bf16}}\n          use: {TILING}\n'
        f"          proof: {proof}\n        - when: {{}}\n          use: {TILING}\n          proof: {{source: static}}\n"
    )


def database(units: int = 132, triton: str | None = None, kernels: str | None = None) -> str:
    triton = triton or tuning.triton_version() or "3.6.0"
    problem = "B4 H16 S4096 D128 causal bf16"
    return HEAD % (units, triton) + (
        kernels
        or entries("forward", 500.0, problem) + entries("backward_dkv", 900.0, problem) + entries("backward_dq", 700.0, problem)
    )


@pytest.fixture
def records(monkeypatch):
    """records(text) makes the text the whole tuning database."""

    def install(text: str | None) -> None:
        rungs = [] if text is None else [(parse(text, "h200.yaml"), "h200.yaml", True)]
        monkeypatch.setattr(tuning, "_rungs", lambda device: iter(rungs))
        monkeypatch.setattr(proofs, "_rungs", lambda device: iter(rungs))
        tuning.clear_caches()

    yield install
    tuning.clear_caches()


class FakeGpu(Runner):
    """Says how long each kernel takes (microseconds) and launches nothing. `first`: factor of the first measurement only."""

    def __init__(self, device, took: dict[str, float], first: float = 1.0):
        self.device, self.where, self.took, self.first = device, torch.device("cpu"), took, first
        self.launched: list[tuple] = []
        self.compiled: list[str] = []
        self.measured = self.rounds = 0

    def plan(self, problem, backend=None):
        space = backends.load("triton").space
        kernels = {k: tuning.lookup(k, problem, self.device, space(k), "triton") for k in ("forward", "backward_dkv", "backward_dq")}
        return Plan(problem, self.device, "triton", MappingProxyType(kernels))

    def forward(self, inputs, plan):
        self.launched.append(("forward", plan, inputs.query.data_ptr()))
        return inputs.query, inputs.query.new_zeros(1)

    def backward(self, inputs, plan, out, lse, grad_out, grad_lse, needs):
        self.launched.append(("backward", plan, inputs.query.data_ptr(), needs))
        return Gradients()

    def seconds(self, step, calls):
        if (kernel := next(iter(self.launched[-1][1].kernels))) not in self.compiled and len(self.launched[-1][1].kernels) == 1:
            self.compiled.append(kernel)  # the launch before a kernel's first timing was its own
        for i in range(calls):
            step(i)
        kernels = {k for launch in self.launched[-calls:] for k in launch[1].kernels}
        (kernel,) = kernels  # one kernel at a time
        self.measured += 1
        factor = self.first if self.measured <= self.rounds + 2 else 1.0  # the estimate of the number of calls asks twice
        return calls * 1e-6 * self.took[kernel] * factor


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """gpu(took, ...) -> the context of an H200 whose kernels take so long; small tensors stand for its large ones."""
    real, tiny = speed.make_inputs, {"batch": 1, "heads_q": 1, "heads_k": 1, "seqlen_q": 2, "seqlen_k": 2}
    monkeypatch.setattr(speed, "make_inputs", lambda case, *rest: real(replace(case, **tiny), *rest))
    torch_sees(monkeypatch, properties())
    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(Nvml()))

    def make(took, level="quick", first=1.0, device=H200):
        context = Context(FakeGpu(device, took, first), level, 0, golden=tmp_path)
        context.runner.rounds = speed.rounds_of(context, len(took))
        return context

    return make


GOOD = {"forward": 505.0, "backward_dkv": 890.0, "backward_dq": 700.0}


# ------------------------------------------------------------------ against the record
def test_a_gpu_at_its_record_passes(records, gpu):
    records(database())
    context = gpu(GOOD)
    found = list(speed.run(context))
    assert [c.id for c in found] == [f"speed/{k}/b4-h16-s4096-d128-causal-bf16" for k in ("forward", "backward_dkv", "backward_dq")]
    assert {(c.status, c.severity, c.hint) for c in found} == {("pass", "minor", "")}
    assert [c.measured for c in found] == pytest.approx([1.01, 890 / 900, 1.0], abs=1e-3)
    data = found[0].data
    assert (data["record_us"], data["record"], data["measured_us"]) == (500.0, "h200.yaml", 505.0)
    assert data["tiling"].startswith("block_m=64") and data["sm_clock_min"] == 1980
    assert {(u.backend, u.kernel) for u in context.used.values()} == {("triton", k) for k in GOOD}


def test_what_is_timed_is_what_the_tuner_timed(records, gpu):
    records(database())
    context = gpu(GOOD)
    list(speed.run(context))
    launched = context.runner.launched
    assert context.runner.compiled == ["forward", "backward_dkv", "backward_dq"]  # before they are timed
    timed = [launch for launch in launched if len(launch[1].kernels) == 1]
    needs = {next(iter(launch[1].kernels)): launch[3] for launch in timed if launch[0] == "backward"}
    assert needs == {"backward_dkv": Needs(query=False), "backward_dq": Needs(key=False, value=False)}
    key = Key("triton", "forward", "bf16", 128, True, 4096)
    assert timed[0][1].problem == key.problem() and timed[0][1].kernels["forward"].tiling == Tiling(64, 64, 4, 2)


def test_small_calls_rotate_copies_that_no_cache_holds(records, gpu):
    problem = "B1 H4 S512 D64 full bf16"  # 1 MiB: all eight copies
    records(database(kernels=entries("forward", 500.0, problem) + entries("backward_dq", 700.0, problem)))
    context = gpu(GOOD)
    assert [c.status for c in speed.run(context)] == ["pass", "skipped", "pass"]
    for kernel in ("forward", "backward_dq"):
        timed = [launch[2] for launch in context.runner.launched if list(launch[1].kernels) == [kernel]]
        assert len(set(timed)) == 8 and timed[-8:] == timed[-16:-8]


@pytest.mark.parametrize("factor, status, limit", [(1.19, "pass", 1.20), (1.22, "warn", 1.20), (1.5, "fail", 1.35)])
def test_bounds(records, gpu, factor, status, limit):
    records(database())
    found = list(speed.run(gpu(GOOD | {"backward_dq": 700.0 * factor})))
    assert [c.status for c in found] == ["pass", "pass", status]
    assert found[2].measured == pytest.approx(factor, abs=1e-3) and found[2].limit == limit
    assert (found[2].hint == "") == (status == "pass")
    control, right = Check(id="control/a", status="pass"), Check(id="accuracy/a/out", status="pass")
    assert verdict_of([control, right, *found]) == ("fail" if status == "fail" else "pass")


def test_what_was_in_the_way_once_is_measured_again(records, gpu):
    records(database())
    found = list(speed.run(gpu(GOOD, first=2.0)))
    assert [c.status for c in found] == ["pass"] * 3


def test_hint_names_clocks_heat_and_power_cap(records, gpu, monkeypatch):
    card = Nvml()
    card.reasons, card.clock = sys.modules["pynvml"].nvmlClocksEventReasonSwThermalSlowdown, 1200
    module = nvml_module(card)
    module.nvmlDeviceGetEnforcedPowerLimit = lambda gpu: 500_000
    monkeypatch.setitem(sys.modules, "pynvml", module)
    records(database())
    check = next(speed.run(gpu(GOOD | {"forward": 900.0})))
    assert check.status == "fail" and check.data["sm_clock_min"] == 1200
    for words in ("software thermal slowdown", "1200 MHz of 1980", "500 W, the record was made at 700 W", "cooling"):
        assert words in check.hint


# ------------------------------------------------------------------ records that do not hold
@pytest.mark.parametrize(
    "text, reason",
    [
        (database(units=114), "114 compute units"),
        (database(triton="2.0.0"), "triton 2.0"),
        (database(kernels=entries("forward", 500.0, "B4 H16 S4096 D128 causal bf16", space="00000000")), "older kernel"),
        (database(kernels=entries("forward", 500.0, "all of them")), "no measured time"),
        (None, "has no triton forward"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:h200.yaml. tilings of triton")
def test_a_record_that_does_not_hold_is_skipped_with_the_reason(records, gpu, text, reason):
    records(text)
    check = next(speed.run(gpu(GOOD)))
    assert check.status == "skipped" and reason in check.detail and check.data["measured_us"] == 505.0
    assert check.id == "speed/forward/b4-h16-s4096-d128-causal-bf16"  # so that nodes can still be compared


def test_a_record_of_a_tiling_that_is_not_in_use_is_none(records, gpu):
    shadowed = entries("forward", 500.0, "B4 H16 S4096 D128 causal bf16").replace(
        "        - when: {dtype: bf16}",
        "        - when: {dtype: bf16, causal: true}\n"
        f"          use: {TILING.replace('64', '128', 1)}\n          proof: {{source: static}}\n        - when: {{dtype: bf16}}",
    )
    records(database(kernels=shadowed))
    check = next(speed.run(gpu(GOOD)))
    assert check.status == "skipped" and "no measured time of a tiling that is in use" in check.detail


def test_levels_take_the_recorded_calls_nearest_to_their_kinds(records):
    calls = [("B16 H32", 1024, 64, "full bf16"), ("B4 H16", 4096, 128, "causal bf16"), ("B2 H16", 8192, 128, "causal bf16")]
    calls.append(("B1 H8", 8192, 256, "causal bf16"))
    forward = "".join(
        f"        - when: {{dtype: [bf16, fp16], head_dim_le: {d}, seqlen_q_le: {s}}}\n          use: {TILING}\n"
        f'          proof: {{source: measured, problem: "{batch} S{s} D{d} {kind}", median_us: 100.0}}\n'
        for batch, s, d, kind in calls
    )
    space = backends.load("triton").space("forward")
    kernels = f'    forward:\n      space: "{space}"\n      entries:\n{forward}        - when: {{}}\n          use: {TILING}\n'
    records(database(kernels=kernels))
    plan_of = FakeGpu(H200, {}).plan
    names = {level: [t.name for t in proofs.timings(H200, level, plan_of) if t.record] for level in ("quick", "standard")}
    assert names["quick"] == ["forward/b4-h16-s4096-d128-causal-bf16"]
    assert set(names["standard"]) == {
        "forward/b4-h16-s4096-d128-causal-bf16", "forward/b2-h16-s8192-d128-causal-bf16",
        "forward/b16-h32-s1024-d64-full-bf16", "forward/b1-h8-s8192-d256-causal-bf16",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "x" * 1000, "B4 H16 S4096 D128 bf16", "B4 H16 S4096 D128 causal bf8", "B0 H16 S4096 D128 full bf16", "B1 H3/2 S1 D8 full bf16"],
)
def test_a_problem_of_another_form_is_no_record(text):
    assert proofs.parse_problem(text) is None


def test_every_measured_proof_that_is_shipped_names_its_problem():
    """The writer of the tuner and this reader speak the same form."""
    from portable_flash.device import catalogue

    seen = 0
    for record in catalogue().values():
        for kernels in record.kernels.values():
            for kernel in kernels.values():
                for entry in kernel.entries:
                    if entry.proof.get("source") == "measured":
                        seen += 1
                        assert proofs.parse_problem(entry.proof["problem"]) is not None, (record.file, entry.proof)
    assert seen


# ------------------------------------------------------------------ recorded results: the CPU and unknown GPUs
class Told(Runner):
    """The CPU backend, with times that are told."""

    factor = 1.0

    def seconds(self, step, calls):
        assert torch.get_num_threads() == 1  # as many as nobody else disturbs
        step(0)
        return 1e-3 * calls * self.factor


def cpu_report(checks) -> Report:
    pair = [Check(id="control/a", status="pass"), Check(id="accuracy/a/out", status="pass")]
    device = DeviceReport(identity=identity.identify(cpu()), verdict="pass", checks=[*pair, *checks])
    return Report(
        host="h", verdict="pass", level="quick", seed=0, started="2026-01-01T00:00:00+00:00", seconds=1.0, strict=False, command=[],
        software=identity.software(), devices=[device],
    )  # fmt: skip


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_cpu_is_compared_with_what_was_recorded_there(tmp_path, monkeypatch, two_threads):
    context = Context(Told(cpu()), "quick", 0, small=True, golden=tmp_path)
    first = list(speed.run(context))
    assert [c.id.split("/")[1] for c in first] == ["forward", "backward"]
    assert {c.status for c in first} == {"skipped"} and all("no record" in c.detail and c.data["measured_us"] == 1000.0 for c in first)
    golden.record(cpu_report(first), tmp_path)
    assert [(c.status, c.measured, c.data["record"]) for c in speed.run(context)] == [("pass", 1.0, golden.RECORDED)] * 2
    monkeypatch.setattr(Told, "factor", 1.2)
    assert {c.status for c in speed.run(context)} == {"pass"}  # other processes share a CPU
    monkeypatch.setattr(Told, "factor", LIMITS.cpu_fail * 1.1)
    assert {c.status for c in speed.run(context)} == {"fail"}
    monkeypatch.setattr(identity, "_cpu_model", lambda: "another CPU")
    assert {c.status for c in speed.run(context)} == {"skipped"}


def test_a_broken_file_of_records_is_a_reason(tmp_path):
    path = golden.path_of(tmp_path, "cpu", "cpu")
    path.parent.mkdir()
    path.write_text("schema: 9\n")
    found = list(speed.run(Context(Told(cpu()), "quick", 0, small=True, golden=tmp_path)))
    assert {c.status for c in found} == {"skipped"} and "cpu.yaml:1: lacks device" in found[0].detail


def test_without_golden_records_the_users_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    context = Context(Told(cpu()), "quick", 0, small=True)
    golden.record(cpu_report(list(speed.run(context))), golden.default_folder())
    assert {c.status for c in speed.run(context)} == {"pass"}


def test_the_deadline_is_kept(tmp_path):
    context = Context(Told(cpu()), "quick", 0, small=True, golden=tmp_path, deadline=0.0)
    assert {(c.status, c.detail) for c in speed.run(context)} == {("skipped", "the time was over")}


def test_the_real_cpu_is_timed(tmp_path):
    found = list(speed.run(Context(Runner(cpu()), "quick", 0, small=True, golden=tmp_path)))
    assert len(found) == 2 and all(10 < c.data["measured_us"] < 5e6 and c.seconds > 0 for c in found)


# ------------------------------------------------------------------ the node
def node(*times: float, slug="h200", partition=None, vendor="nvidia") -> list[DeviceReport]:
    def one(index, microseconds):
        who = Identity(index=index, name="x", slug=slug, vendor=vendor, arch="a", compute_units=132, memory_bytes=1, partition=partition)
        check = Check(id="speed/forward/x", status="pass", data={"timed": "forward/x", "tiling": "t", "measured_us": microseconds})
        return DeviceReport(identity=who, verdict="pass", checks=[check])

    return [one(i, microseconds) for i, microseconds in enumerate(times)]


def test_the_slow_gpu_of_a_node_is_named():
    found = compare_node(node(100, 101, 99, 160, 115, 100, 100, 98))
    assert [found[i][0].status for i in range(8)] == ["pass"] * 3 + ["fail", "warn"] + ["pass"] * 3
    assert found[3][0].id == "speed/node/forward/x" and found[3][0].measured == pytest.approx(1.6) and "GPU 3" in found[3][0].hint
    assert found[3][0].limit == 1.25 and found[4][0].limit == 1.10 and found[0][0].hint == ""


def test_of_two_gpus_both_are_warned_of():
    found = compare_node(node(100, 160))
    assert [found[i][0].status for i in (0, 1)] == ["warn", "warn"]
    assert all("GPU 0" in c.hint and "GPU 1" in c.hint for i in (0, 1) for c in found[i])
    assert [c.status for i in (0, 1) for c in compare_node(node(100, 105))[i]] == ["pass", "pass"]


def test_only_equals_are_compared():
    reports = [*node(100), *node(300, slug="l4"), *node(500, partition="MIG 1g.18gb")]
    assert compare_node(reports) == {0: [], 1: [], 2: []}
    assert compare_node(node(100, 900, vendor="cpu")) == {0: [], 1: []}
    other = node(100, 160)
    other[1] = replace(other[1], checks=[replace(c, data=c.data | {"tiling": "another"}) for c in other[1].checks])
    assert compare_node(other) == {0: [], 1: []}
    assert compare_node(node(100)) == {0: []}
    assert signals.checks(signals.read(cpu()), signals.read(cpu()))[0].status == "skipped"


def test_a_plan_of_the_dispatcher_is_narrowed_to_one_kernel():
    kernels = MappingProxyType({k: KernelPlan(Tiling(64, 64), "x") for k in ("forward", "backward_dkv")})
    problem = Key("triton", "forward", "bf16", 64, False, 512).problem()
    one = proofs.Timing("backward_dkv", problem, Plan(problem, H200, "triton", kernels))
    assert list(speed._only(one).kernels) == ["backward_dkv"]
