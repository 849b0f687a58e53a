"""The tuning database: what its reader refuses, the order of the look-up ladder, and the rule at its foot."""

import importlib
import itertools
import os
import warnings
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from portable_flash import database
from portable_flash.backends import hip, load
from portable_flash.database import Blocked, DatabaseError, When, parse, read
from portable_flash.device import Device, catalogue, cpu, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling, padded_head_dim

tuning = importlib.import_module("portable_flash.tuning")  # the package exports a function of this name
lookup, rule = tuning.lookup, tuning.rule


def problem(**changes):
    sizes = dict(dtype=torch.bfloat16, batch=2, heads_q=8, heads_k=8, seqlen_q=2048, seqlen_k=2048, head_dim=64, head_dim_v=64)
    return Problem(**{**sizes, **changes})


def text(slug="h200", arch="sm_90", vendor="nvidia", units=132, inherits="null", block_m=64, kernels=None, measured="", backend="triton"):
    """A file; `kernels` are those of `backend`, indented by two."""
    if kernels is None and block_m:
        kernels = f"  forward:\n    entries:\n      - {{when: {{}}, use: {{block_m: {block_m}, block_n: 32}}}}\n"
    kernels = f"  {backend}:\n" + "".join(f"  {line}" for line in kernels.splitlines(True)) if kernels else "  {}\n"
    return f"""schema: 1
device:
  slug: {slug}
  vendor: {vendor}
  arch: {arch}
  match: {{compute_units: {units}}}
  limits: {{wave_size: 32, shared_memory_bytes: 232448, memory_gb: 141, l2_bytes: 52428800}}
  inherits: {inherits}
{measured}kernels:
{kernels}"""


H200 = named("h200")


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """No user and no site files; place(catalogue=[texts], user=text, site=text) puts some."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("APPDATA", str(tmp_path / "config"))
    monkeypatch.delenv(tuning.SITE_VARIABLE, raising=False)
    monkeypatch.setattr(tuning, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(tuning.triton_version, "cache_clear", lambda: None, raising=False)

    def put(catalogue=None, user=None, site=None):
        tuning.clear_caches()
        if catalogue is not None:
            records = [parse(t, "packaged") for t in catalogue]
            monkeypatch.setattr(tuning, "catalogue", lambda: MappingProxyType({r.slug: r for r in records}))
        if user is not None:
            path = tuning.user_folder() / "nvidia" / "h200.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(user)
        if site is not None:
            (tmp_path / "site.yaml").write_text(site)
            monkeypatch.setenv(tuning.SITE_VARIABLE, str(tmp_path / "site.yaml"))

    tuning.clear_caches()
    yield put
    tuning.clear_caches()


# ------------------------------------------------------------------ reading
def test_the_example_of_the_documentation():
    record = parse(
        text(slug="mi300x", arch="gfx942", vendor="amd", kernels="""  forward:
    space: "9f3c1b2a"
    entries:
      - when: {dtype: bf16, head_dim_le: 128, seqlen_q_le: 4096, seqlen_k_le: 4096, causal: true}
        use: {block_m: 128, block_n: 64, num_warps: 4, num_stages: 1, waves_per_eu: 2}
        proof: {source: measured, median_us: 412.3, p20_us: 410.9, p80_us: 415.0, error_ratio: 1.02, repeatable: true}
      - {when: {}, use: {block_m: 64, block_n: 64}}
    blocked:
      - {use: {block_m: 256, num_warps: 8}, reason: "wrong dv at head_dim 80", issue: "link"}
""", measured="measured_with: {triton: \"3.7.1\", date: 2026-12-01, power_cap_w: 750}\n"),
        "mi300x.yaml",
    )  # fmt: skip
    forward = record.kernels["triton"]["forward"]
    assert forward.space == "9f3c1b2a" and forward.entries[0].use == Tiling(128, 64, 4, 1, waves_per_eu=2)
    assert forward.entries[0].when == When(dtype=("bf16",), head_dim_le=128, seqlen_q_le=4096, seqlen_k_le=4096, causal=True)
    assert forward.entries[0].proof["median_us"] == 412.3 and record.measured_with["power_cap_w"] == 750
    assert forward.blocked[0](Tiling(256, 64, 8)) and not forward.blocked[0](Tiling(256, 64, 4))


BLOCK = "{block_m: 64, block_n: 64}"
ENTRY = "  forward:\n    entries:\n      - {when: %s, use: %s}\n"


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "x.yaml: empty"),
        ("[1, 2]", "x.yaml:1: must be a mapping"),
        ("schema: [1", r"x.yaml:\d+: not YAML"),
        ("schema: 1\n", "x.yaml:1: lacks device"),
        (text().replace("schema: 1", "schema: 2"), "x.yaml:1: schema: 2: allowed are 1"),
        (text().replace("schema: 1", "schema: true"), "schema: True: allowed are 1"),
        (text().replace("vendor: nvidia", "vendor: intel"), "x.yaml:4: device.vendor: 'intel': allowed are nvidia, amd"),
        (text().replace("slug: h200", "slug: 3090"), "x.yaml:3: device.slug: must be text"),
        (text().replace("slug:", "slgu:"), "x.yaml:3: device.slgu: unknown field; allowed are aliases, arch,"),
        (text().replace("memory_gb: 141", "memory_gb: -1"), "x.yaml:7: device.limits.memory_gb: must be a positive number, got -1"),
        (text().replace("memory_gb: 141", "memory_gb: .nan"), "must be a positive number"),
        (text().replace("wave_size: 32", "wave_size: 32, wave_size: 64"), "device.limits.wave_size: given twice"),
        (text().replace("{compute_units", "{pci_ids: ['10DE:2335'], compute_units"), r"match.pci_ids\[0\]: '10DE:2335': must be"),
        (text(measured="measured_with: {triton: 3.10}\n"), "x.yaml:9: measured_with: triton must be quoted text"),
        (text(measured="measured_with: {date: 2026-13-45}\n"), "x.yaml:9: measured_with.date"),
        (text(kernels="  sideways: {}\n"), "x.yaml:11: kernels.triton.sideways: unknown field; allowed are backward_dkv, backward_dq, "),
        (text(backend="cuda"), "x.yaml:11: kernels.cuda: unknown field; allowed are hip, triton"),
        (text(backend="forward"), r"x.yaml:11: kernels.forward: tilings belong to a backend: put forward below kernels.triton .or hip"),
        (text(kernels=ENTRY % ("{}", "{block_m: 100, block_n: 64}")), r"x.yaml:13: kernels.triton.*entries\[0\].use: .*a power of two"),
        (text(kernels=ENTRY % ("{}", "{block_m: 64}")), "block_n"),
        (text(kernels=ENTRY % ("{}", "{block_m: 64, block_n: 64, tma: 1}")), r"entries\[0\].use.tma: must be true or false, got 1"),
        (text(kernels=ENTRY % ("{}", "{block_m: true, block_n: 64}")), "use.block_m: must be an integer"),
        (text(kernels=ENTRY % ("{head_dim: 64}", BLOCK)), "when.head_dim: unknown field; allowed are causal, dtype, head_dim_le"),
        (text(kernels=ENTRY % ("{dtype: float16}", BLOCK)), "when.dtype: 'float16': allowed are fp16, bf16, fp32"),
        (text(kernels=ENTRY % ("{causal: true}", BLOCK)), "the last entry must match every problem"),
        (text(kernels=ENTRY % ("{}", BLOCK) + "      - {when: {}, use: {block_m: 16, block_n: 16}}\n"), "entries after it are never used"),
        (text(kernels="  forward:\n    blocked:\n      - {use: {}, reason: none}\n"), "would block every tiling"),
        (text(kernels="  forward:\n    blocked:\n      - {use: {block_m: 64}}\n"), "lacks reason"),
        (text(kernels=ENTRY % ("{}", "{block_m: 64, block_n: 64}, proof: {source: guessed}")), "'guessed': allowed are measured, static"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_file_line_and_field(source, message):
    with pytest.raises(DatabaseError, match=message):
        parse(source, "x.yaml")


@pytest.mark.parametrize(
    "source, message",
    [
        ("schema: !!python/object/apply:os.system ['true']\n", "x.yaml:1: tag .*tags are not allowed"),
        ("schema: 1\ndevice: !!python/name:os.system\n", "x.yaml:2: tag"),
        ("schema: &a 1\ndevice: *a\n", "x.yaml:1: anchors and aliases are not allowed"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "anchors and aliases"),
        ("schema: " + "[" * 100_000, "x.yaml:1: (nested deeper than 16|not YAML)"),
        ("schema: " + "- " * 100_000, "x.yaml:1: (nested deeper than 16|not YAML)"),
        ("schema:\n  " + "? " * 100_000, "(nested deeper than 16|not YAML)"),
        (b"\xff\xfe\x00\x01\x02", "x.yaml"),
        (b"schema: \x00", "x.yaml"),
        ("--- 1\n--- 2\n", "x.yaml:2: not YAML"),
    ],
)
def test_hostile_files(source, message):
    with pytest.raises(DatabaseError, match=message):
        parse(source, "x.yaml")


def test_size_is_bounded_and_unreadable_files_are_named(tmp_path):
    (tmp_path / "big.yaml").write_text("#" * (database.MAX_BYTES + 1))
    with pytest.raises(DatabaseError, match="big.yaml: larger than"):
        database.read(tmp_path / "big.yaml")
    with pytest.raises(DatabaseError, match="absent.yaml: cannot be read: No such file"):
        database.read(tmp_path / "absent.yaml")


# ------------------------------------------------------------------ conditions
@pytest.mark.parametrize(
    "when, matching, other",
    [
        (When(dtype=("bf16", "fp16")), {}, {"dtype": torch.float32}),
        (When(head_dim_le=64), {}, {"head_dim": 65}),
        (When(head_dim_v_le=64), {}, {"head_dim_v": 128}),
        (When(seqlen_q_le=2048), {}, {"seqlen_q": 2049}),
        (When(seqlen_k_le=2048), {}, {"seqlen_k": 4096}),
        (When(causal=True), {"window_right": 0}, {}),
        (When(causal=False), {}, {"window_right": 0}),
        (When(varlen=True), {"varlen": True}, {}),
        (When(mask_or_bias=True), {"bias": True}, {}),
        (When(mask_or_bias=False), {"alibi": True}, {"mask": True}),
    ],
)
def test_when(when, matching, other):
    assert when(problem(**matching)) and not when(problem(**other))


def test_first_match_wins(place):
    blocks = {"{head_dim_le: 64}": 16, "{head_dim_le: 128}": 32, "{}": 64}
    rows = "".join(f"      - {{when: {when}, use: {{block_m: {m}, block_n: 16}}}}\n" for when, m in blocks.items())
    place(catalogue=[text(kernels="  forward:\n    entries:\n" + rows)])
    assert [lookup("forward", problem(head_dim=d), H200).tiling.block_m for d in (32, 64, 80, 128, 192)] == [16, 16, 32, 32, 64]


# ------------------------------------------------------------------ ladder
def test_each_rung_in_order(place):
    other = text(slug="h100", units=130, block_m=32)
    base = text(slug="base", arch="sm_other", block_m=16)
    plan = lambda: lookup("forward", problem(), H200)  # noqa: E731
    place(catalogue=[text(block_m=None)])
    assert plan().source == "rule" and plan().tiling == rule("forward", problem(), H200)
    place(catalogue=[text(block_m=None), other])
    assert (plan().source, plan().tiling.block_m) == ("h100.yaml (same arch, 130 units for 132)", 32)
    place(catalogue=[text(block_m=None, inherits="base"), other, base])
    assert (plan().source, plan().tiling.block_m) == ("base.yaml (inherited by h200)", 16)
    place(catalogue=[text(block_m=64, inherits="base"), other, base])
    assert (plan().source, plan().tiling.block_m) == ("h200.yaml", 64)
    place(site=text(block_m=128))
    assert plan().source.startswith("site file ") and plan().tiling.block_m == 128
    place(user=text(block_m=256))
    assert plan().source.startswith("user file ") and plan().source.endswith("h200.yaml") and plan().tiling.block_m == 256
    with tuning.tuning(forward=Tiling(16, 16)):
        assert plan().source == "argument" and plan().tiling == Tiling(16, 16)
    assert plan().tiling.block_m == 256


def test_nearest_unit_count_first(place):
    other_arch = text(slug="other", arch="sm_89", units=100, block_m=64)
    place(catalogue=[text(slug="far", units=60, block_m=16), text(slug="near", units=120, block_m=32), other_arch])
    unknown = Device("sm_90", "nvidia", "sm_90", "?", 100, shared_memory_bytes=232448)
    assert lookup("forward", problem(), unknown).source == "near.yaml (same arch, 120 units for 100)"


def test_a_site_folder_and_a_file_of_another_gpu(place, tmp_path, monkeypatch):
    (tmp_path / "site" / "nvidia").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "h200.yaml").write_text(text(block_m=16))
    monkeypatch.setenv(tuning.SITE_VARIABLE, str(tmp_path / "site"))
    place(catalogue=[text(block_m=None)])
    assert lookup("forward", problem(), H200).tiling.block_m == 16
    place(site=text(slug="h100", block_m=16))
    assert lookup("forward", problem(), H200).source == "rule"
    (tmp_path / "site" / "nvidia" / "h200.yaml").write_text(text(slug="h100"))
    monkeypatch.setenv(tuning.SITE_VARIABLE, str(tmp_path / "site"))
    place()
    with pytest.raises(DatabaseError, match="its path says nvidia/h200"):
        lookup("forward", problem(), H200)


def test_corrupt_or_absent_files_that_a_person_named_are_errors(place, monkeypatch):
    monkeypatch.setenv(tuning.SITE_VARIABLE, os.path.join("no", "such", "place"))
    with pytest.raises(DatabaseError, match="PORTABLE_FLASH_TUNING=.*no such file or folder"):
        lookup("forward", problem(), H200)
    monkeypatch.delenv(tuning.SITE_VARIABLE)
    place(user="schema: {")
    with pytest.raises(DatabaseError, match=r"h200.yaml:\d: not YAML"):
        lookup("forward", problem(), H200)


def test_an_entry_that_does_not_fit_falls_through(place):
    huge = ENTRY % ("{}", "{block_m: 256, block_n: 256, num_warps: 8, num_stages: 4}")
    place(catalogue=[text(kernels=huge, inherits="base"), text(slug="base", arch="sm_other", block_m=32)])
    assert lookup("forward", problem(), H200).source == "base.yaml (inherited by h200)"
    place(catalogue=[text(kernels=huge)])
    assert lookup("forward", problem(), H200).source == "rule"


def test_blocked_tilings_are_never_chosen(place):
    best = rule("forward", problem(), H200)
    blocked = f"  forward:\n    blocked:\n      - {{use: {{block_m: {best.block_m}, block_n: {best.block_n}}}, reason: wrong}}\n"
    use = f"      - {{when: {{}}, use: {{block_m: {best.block_m}, block_n: {best.block_n}}}}}\n"
    place(catalogue=[text(kernels=blocked), text(slug="kin", kernels="  forward:\n    entries:\n" + use)])
    plan = lookup("forward", problem(), H200)
    assert plan.source == "rule" and (plan.tiling.block_m, plan.tiling.block_n) != (best.block_m, best.block_n)
    assert plan.tiling.unfit("forward", problem(), H200) is None
    everything = tuple(Blocked({"num_stages": n}, "none works") for n in range(1, 9))
    assert rule("forward", problem(), H200, everything)  # still a tiling: nothing is left to choose, and look-up never fails


def test_unknown_kernel():
    with pytest.raises(ValueError, match="kernel='sideways': allowed are forward, backward_dkv, backward_dq"):
        lookup("sideways", problem(), H200)


# ------------------------------------------------------------------ staleness
def test_another_space_voids_the_kernel_with_one_warning(place):
    place(catalogue=[text(kernels=(ENTRY % ("{}", BLOCK)).replace("entries", 'space: "00000000"\n    entries', 1))])
    assert lookup("forward", problem(), H200, space="00000000").source == "h200.yaml"
    assert lookup("forward", problem(), H200).source == "h200.yaml"  # a backend that has no hash asks nothing
    with pytest.warns(UserWarning, match="tilings of triton's forward are of an older kernel .space 00000000, now 11111111"):
        assert lookup("forward", problem(), H200, space="11111111").source == "rule"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lookup("forward", problem(batch=3), H200, space="11111111").source == "rule"


def test_space_hash():
    one = tuning.space_hash("def kernel(): ...")
    assert len(one) == 8 and int(one, 16) >= 0
    assert one == tuning.space_hash("def kernel(): ...") != tuning.space_hash("def kernel(): pass")


@pytest.mark.parametrize("measured, stale", [("3.6.1", None), ("3.7.0", "3.7"), ("3.60.0", "3.60")])
def test_another_triton_is_used_and_said(place, measured, stale):
    note = f" (stale: measured with triton {stale})" if stale else ""
    place(catalogue=[text(measured=f'measured_with: {{triton: "{measured}"}}\n')])
    assert lookup("forward", problem(), H200).source == "h200.yaml" + note


# ------------------------------------------------------------------ override and cache
def test_override_is_a_key():
    assert tuning.override() == ()
    with tuning.tuning(forward=Tiling(16, 16), backward_dq=Tiling(32, 32)):
        assert dict(tuning.override()) == {"forward": Tiling(16, 16), "backward_dq": Tiling(32, 32)} and hash(tuning.override())


def test_override_nests_merges_and_accepts_dicts():
    with tuning.tuning(forward=Tiling(16, 16), backward_dq={"block_m": 32, "block_n": 16}):
        with tuning.tuning({"forward": {"block_m": 64, "block_n": 64, "num_warps": 8}}):
            assert lookup("forward", problem(), H200).tiling == Tiling(64, 64, 8)
            assert lookup("backward_dq", problem(), H200).tiling == Tiling(32, 16)
        assert lookup("forward", problem(), H200).tiling == Tiling(16, 16)
        assert lookup("backward_dkv", problem(), H200).source != "argument"
    assert lookup("forward", problem(), H200).source != "argument"


def test_override_mistakes():
    with pytest.raises(ValueError, match="kernel 'fwd': allowed are forward, backward_dkv, backward_dq"):
        tuning.tuning(fwd=Tiling(16, 16)).__enter__()
    with pytest.raises(ValueError, match="must be a Tiling or a dict of block_m, block_n"):
        tuning.tuning(forward={"block_k": 16}).__enter__()
    with pytest.raises(ValueError, match="power of two"):
        tuning.tuning(forward={"block_m": 17, "block_n": 16}).__enter__()


def test_one_search_for_each_distinct_question(monkeypatch):
    searches = []
    real = tuning._rungs
    monkeypatch.setattr(tuning, "_rungs", lambda device: searches.append(device) or real(device))
    first = lookup("forward", problem(), H200)
    assert all(lookup("forward", problem(), H200) is first for _ in range(5)) and len(searches) == 1
    lookup("backward_dq", problem(), H200)
    lookup("forward", problem(batch=3), H200)
    lookup("forward", problem(), named("h100"))
    assert len(searches) == 4


# ------------------------------------------------------------------ rule
@pytest.mark.parametrize("slug", sorted(catalogue()))
def test_rule_fits_every_device(slug):
    device = named(slug)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for d, dv in [(d, d) for d in (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256)] + [(192, 128)]:
            for kernel in KERNELS:
                p = problem(dtype=dtype, head_dim=d, head_dim_v=dv)
                tiling = rule(kernel, p, device)
                unfit = tiling.unfit(kernel, p, device)
                if dtype == torch.float32 and padded_head_dim(dv) == 256 and device.shared_memory_bytes <= 65536 and unfit:
                    # the resource model keeps all four operands in 64 KiB of LDS; the smallest tiling is what is left
                    assert kernel != "forward" and (tiling.block_m, tiling.block_n, tiling.num_stages) == (16, 16, 1)
                else:
                    assert unfit is None, (kernel, dtype, d, dv, unfit)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (1, 1), (1, 4096), (17, 100), (4096, 1)])
def test_rule_for_short_sequences(kernel, sizes):
    p = problem(seqlen_q=sizes[0], seqlen_k=sizes[1])
    tiling = rule(kernel, p, H200)
    assert tiling.unfit(kernel, p, H200) is None
    assert tiling.block_m <= max(16, 2 * sizes[0]) and tiling.block_n <= max(16, 2 * sizes[1])


def test_rule_on_the_cpu_and_on_a_gpu_that_nobody_knows():
    assert lookup("forward", problem(), cpu()) == tuning.KernelPlan(Tiling(32, 32), "rule")
    tiny = Device("sm_75", "nvidia", "sm_75", "?", 40, shared_memory_bytes=65536)
    large = problem(head_dim=256, head_dim_v=256)
    for kernel in KERNELS:
        assert lookup(kernel, large, tiny).tiling.unfit(kernel, large, tiny) is None
    unknown = Device("gfx1250", "amd", "gfx1250", "?", 1)  # no shared memory known: nothing fits, there is still an answer
    assert lookup("forward", problem(), unknown).source == "rule"


@pytest.mark.parametrize("slug", sorted(slug for slug, record in catalogue().items() if record.vendor == "amd"))
def test_rule_fits_every_amd_gpu_for_hip(slug):
    device = named(slug)
    sizes = [(0, 0), (1, 1), (1, 4096), (17, 100), (4096, 1), (2048, 2048)]
    for dtype, (rows, keys), mask in itertools.product((torch.bfloat16, torch.float32), sizes, (False, True)):
        for d, dv in [(d, d) for d in (1, 32, 64, 80, 96, 128, 160, 192, 256)] + [(192, 128), (64, 256)]:
            for kernel in KERNELS:
                p = problem(dtype=dtype, seqlen_q=rows, seqlen_k=keys, head_dim=d, head_dim_v=dv, mask=mask)
                tiling = rule(kernel, p, device, backend="hip")
                assert hip.unfit(tiling, kernel, p, device) is None, (kernel, p, tiling)
                assert hip.settle(tiling, kernel, p, device) == tiling
                assert (tiling.block_n if kernel == "backward_dkv" else tiling.block_m) >= 16 * tiling.num_warps


def test_files_hold_tilings_by_backend(place):
    """A tiling of one backend is not another's, and each is judged by its own backend's model."""
    amd = dict(slug="mi300x", arch="gfx942", vendor="amd", units=304)
    use = "  forward:\n    entries:\n      - {when: {}, use: {block_m: %s, block_n: 32, num_warps: 4}}\n"
    place(catalogue=[text(**amd, kernels=use % 128, backend="hip")])
    device = named("mi300x")
    assert lookup("forward", problem(), device, None, "hip").source == "mi300x.yaml"
    assert lookup("forward", problem(), device, None, "triton").source == "rule"
    with tuning.tuning(forward=Tiling(64, 64)):
        assert {lookup("forward", problem(), device, None, name).tiling for name in ("hip", "triton")} == {Tiling(64, 64)}
    for backend, source in (("hip", "rule"), ("triton", "mi300x.yaml")):  # 32 rows are no four waves' for HIP
        place(catalogue=[text(**amd, kernels=use % 32, backend=backend)])
        assert lookup("forward", problem(), device, None, backend).source == source


def test_shipped_tilings_were_made_for_the_kernels_that_are_shipped():
    recorded = {
        (record.file, backend, name): kernel.space
        for record in catalogue().values()
        for backend, kernels in record.kernels.items()
        for name, kernel in kernels.items()
    }
    assert recorded and all(space == load(backend).space(name) for (_, backend, name), space in recorded.items()), recorded


# ------------------------------------------------------------------ the catalogue reads kernels when they are asked for
def test_shipped_files_read_whole_or_in_parts_are_the_same():
    """The kernels come last in a file, so that the part before them is a document of its own."""
    from importlib import resources

    for record in catalogue().values():
        whole = read(resources.files("portable_flash.tuning_db") / record.file)
        assert dict(record.kernels) == dict(whole.kernels)
        assert replace(record, kernels=None, file="") == replace(whole, kernels=None, file="")


def test_kernels_are_read_when_they_are_used(tmp_path):
    path = tmp_path / "h200.yaml"
    path.write_text(text(kernels="  sideways: {}\n"))
    record = read(path, "x.yaml", kernels_later=True)
    assert record.slug == "h200"
    with pytest.raises(DatabaseError, match="x.yaml:11: kernels.triton.sideways: unknown field"):
        record.kernels.get("triton")
