"""The files of tuning_db as they ship: who has tilings, that they fit, serve every call, and say where they come from. No GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from portable_flash import backends
from portable_flash.database import When
from portable_flash.device import catalogue, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling
from portable_flash.tuning import SITE_VARIABLE, clear_caches, lookup

OWN = {  # with tilings of their own, by backend
    "triton": ("a100", "b200", "h200", "l40s", "rtx4090", "rtx5090", "mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt", "strix-halo"),
    "hip": ("mi250x", "mi300x", "mi355x", "rx7900xtx", "rx9070xt", "strix-halo"),
}
INHERIT = {  # the same chip, or more or fewer units of it
    "h100": "h200", "h100-pcie": "h100", "mi325x": "mi300x", "mi308x": "mi300x", "mi210": "mi250x", "mi250": "mi250x",
    "mi350x": "mi355x", "rx7900xt": "rx7900xtx",
}  # fmt: skip
FILES = [(backend, slug, kernel) for backend, slugs in OWN.items() for slug in slugs for kernel in KERNELS]
# Where the compiler found no tiling without scratch: bytes a thread at most. float32 without matrix instructions; on RDNA also masks
# at 256 columns and backward kernels, whose waves hold operands twice.
SCRATCH = 3000


@pytest.fixture(autouse=True)
def only_shipped_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("APPDATA", str(tmp_path))
    monkeypatch.delenv(SITE_VARIABLE, raising=False)
    clear_caches()
    yield
    clear_caches()


def record_of(backend, slug, kernel):
    return catalogue()[slug].kernels[backend][kernel]


def problems() -> list[Problem]:
    """Calls of every kind, among them the widest."""
    found = []
    half, kinds = (torch.bfloat16, torch.float16), ("dense", "causal", "packed", "masked")
    for dtype, d, rows, kind in itertools.product((*half, torch.float32), (40, 64, 128, 256), (1, 300, 4096), kinds):
        packed = {"varlen": True, "total_q": 2 * rows, "total_k": 2 * rows} if kind == "packed" else {}
        right = 0 if kind == "causal" else None
        found.append(Problem(dtype, 2, 8, 4, rows, rows, d, d, window_right=right, mask=kind == "masked", **packed))
    return found


def test_who_has_tilings_is_who_should():
    for backend, slugs in OWN.items():
        assert {s for s, r in catalogue().items() if r.kernels.get(backend)} == set(slugs)
    for slug, other in INHERIT.items():
        assert catalogue()[slug].inherits == other and not catalogue()[slug].kernels


@pytest.mark.parametrize(("backend", "slug", "kernel"), FILES)
def test_entries_are_for_the_kernels_as_they_are_and_end_with_one_for_everything(backend, slug, kernel):
    found = record_of(backend, slug, kernel)
    assert found.space == backends.load(backend).space(kernel)
    assert found.entries[-1].when == When() and len({e.when for e in found.entries}) == len(found.entries)


@pytest.mark.parametrize(("backend", "slug", "kernel"), FILES)
def test_every_call_gets_a_tiling_of_the_file_that_can_be_launched(backend, slug, kernel):
    device, space = named(slug), backends.load(backend).space(kernel)
    unfit = getattr(backends.load(backend), "unfit", Tiling.unfit)
    for problem in problems():
        plan = lookup(kernel, problem, device, space, backend)
        reason = unfit(plan.tiling, kernel, problem, device)
        if plan.source == "rule":  # the entry does not fit by the model of shared memory
            assert problem.dtype == torch.float32 and problem.head_dim == 256 and kernel != "forward", (problem, plan)
        else:
            assert plan.source.startswith(f"{slug}.yaml") and reason is None, (problem, plan, reason)


@pytest.mark.parametrize("slug", sorted(INHERIT))
def test_who_inherits_gets_the_tilings_of_the_other_and_is_told(slug):
    root = INHERIT[INHERIT[slug]] if INHERIT[slug] in INHERIT else INHERIT[slug]
    for kernel, problem in itertools.product(KERNELS, [p for p in problems() if p.dtype != torch.float32][::5]):
        plan = lookup(kernel, problem, named(slug), backends.load("triton").space(kernel))
        assert plan.source.startswith(f"{root}.yaml (inherited by {slug})")
        assert plan.tiling == lookup(kernel, problem, named(root), backends.load("triton").space(kernel)).tiling


@pytest.mark.parametrize(("backend", "slug", "kernel"), [f for f in FILES if f[1] != "h200"])
def test_proofs_say_what_was_compiled_and_what_is_public(backend, slug, kernel):
    device = named(slug)
    for entry in record_of(backend, slug, kernel).entries:
        proof = entry.proof
        assert proof["source"] in ("static", "reported") and 0 < proof["registers"] <= max(256, device.registers_per_thread)
        assert 0 < proof["shared_memory_bytes"] <= device.shared_memory_bytes
        may_spill = "bf16" not in (entry.when.dtype or ()) or device.arch.startswith(("gfx11", "gfx12"))
        assert proof.get("spilled_bytes", 0) <= (SCRATCH if may_spill else 0), entry
        dense = entry.when.varlen is False  # what is tuned by key never spills
        assert "spilled_bytes" not in proof or not dense, entry
        if proof["source"] == "reported":
            assert proof["link"].startswith("https://") and device.arch in proof["link"] and dense


def test_files_of_gpus_that_were_not_there_name_their_sources():
    for slug in OWN["triton"]:
        record = catalogue()[slug]
        sources = {e.proof["source"] for kernels in record.kernels.values() for k in kernels.values() for e in k.entries}
        assert ("measured" in sources) == (slug == "h200") == bool(record.measured_with)
