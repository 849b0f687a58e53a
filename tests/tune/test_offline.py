"""Tilings for a GPU that is not here: what is compiled, dropped, chosen and written. No compiler runs but in one test."""

import random
from dataclasses import replace
from types import MappingProxyType

import pytest

from portable_flash import backends
from portable_flash.database import When, parse, read
from portable_flash.device import catalogue, named
from portable_flash.tiling import Tiling
from portable_flash.tune import cli, compiling, offline
from portable_flash.tune.compiling import Compiled
from portable_flash.tune.keys import Key, key_set
from portable_flash.tune.space import default, shortlist
from portable_flash.tune.writer import Update, update_file

MI300X, A100 = named("mi300x"), named("a100")
KEY = Key("triton", "forward", "bf16", 128, True, 4096)
SOUND = Compiled(True, "", 0.1, 100, 0, 1024)
SPILLS = replace(SOUND, registers=256, spilled=16)


class Inline:
    map = staticmethod(map)


class Compiler:
    """Everything is sound but what `spills` says; remembers the jobs."""

    def __init__(self, spills=lambda job: False):
        self.spills, self.jobs = spills, []

    def __call__(self, job):
        self.jobs.append(job)
        return SPILLS if self.spills(job) else SOUND

    @property
    def dense(self):
        return [j for j in self.jobs if not j.problem.varlen and not j.problem.mask]


def rank(keys, device=A100, compile_one=None, **options):
    return offline.rank(keys, device, Inline, compile_one=compile_one or Compiler(), **options)


def forward(*head_dims):
    return key_set("triton", kernels=("forward",), head_dims=head_dims)


# ------------------------------------------------------------------ the choice
def priced(monkeypatch, prices):
    monkeypatch.setattr(offline, "cost", lambda tiling, kernel, problem, device: prices.get(tiling, 1.0))


@pytest.mark.parametrize(("price", "wins"), [(offline.CLEARLY, True), (offline.CLEARLY + 0.01, False), (2.0, False)])
def test_the_default_stands_unless_another_is_clearly_ahead(price, wins, monkeypatch):
    usual, other = default(KEY, A100), Tiling(64, 32, 4)
    priced(monkeypatch, {other: price})
    assert offline.choose(KEY, A100, [usual, other]) == (other if wins else usual)


def test_without_the_default_the_model_decides_alone(monkeypatch):
    low, high = Tiling(64, 32, 4), Tiling(32, 32, 4)
    priced(monkeypatch, {low: 0.9, high: 5.0})
    assert offline.choose(KEY, A100, [high, low]) == low
    assert offline.choose(KEY, A100, []) is None


def test_the_choice_depends_on_no_order():
    keys, tilings = key_set("triton"), list(shortlist(KEY, A100, 12))[1:]
    chosen = offline.choose(KEY, A100, tilings)
    texts = str(offline.entries(rank(keys)))
    for seed in range(3):
        random.Random(seed).shuffle(tilings)
        assert offline.choose(KEY, A100, tilings) == chosen
        assert str(offline.entries(rank(keys))) == texts
    shuffled = sorted(keys, key=lambda k: (k.kernel, random.Random(str(k)).random()))
    one = {name: {e.when.head_dim_le: e.use for e in entries} for name, entries in offline.entries(rank(shuffled)).items()}
    assert one == {name: {e.when.head_dim_le: e.use for e in entries} for name, entries in offline.entries(rank(keys)).items()}


# ------------------------------------------------------------------ what is compiled and dropped
def test_what_cannot_change_the_choice_is_not_compiled():
    compiler = Compiler()
    (ranked,) = rank(forward(128), compile_one=compiler)
    assert [j.tiling for j in compiler.dense] == [ranked.chosen] == [default(KEY, A100)]


@pytest.mark.parametrize("bad", [SPILLS, Compiled(False, "no"), replace(SOUND, shared_memory_bytes=A100.shared_memory_bytes + 1)])
def test_what_spills_does_not_compile_or_does_not_fit_is_dropped(bad):
    usual, every = default(KEY, A100), shortlist(KEY, A100, offline.COUNT)
    (ranked,) = rank(forward(128), compile_one=lambda job: bad if job.tiling == usual else SOUND)
    assert ranked.compiled.keys() == set(every) and ranked.chosen in every and ranked.chosen != usual
    (none,) = rank(forward(128), compile_one=lambda job: bad)
    assert none.chosen is None
    assert all(e.when.varlen is None for e in offline.entries([none]).get(("triton", "forward"), []))  # general ones at most


def test_entries_serve_their_keys_and_say_what_the_compiler_found():
    ranked = rank(key_set("triton"))
    found = offline.entries(ranked)
    for one in ranked:
        for key in one.keys:
            entry = next(e for e in found["triton", key.kernel] if e.when(key.problem()))
            assert (entry.use, dict(entry.proof)) == (one.chosen, {"source": "static", "registers": 100, "shared_memory_bytes": 1024})


def test_head_dims_that_share_a_tiling_share_an_entry():
    entries = offline.entries(rank(forward(64, 96, 128)))["triton", "forward"]
    dense = [e.when.head_dim_le for e in entries if e.when.varlen is False]
    assert default(replace(KEY, head_dim=96), A100) == default(KEY, A100) != default(replace(KEY, head_dim=64), A100)
    assert dense == [64, 128]


def test_general_entries_are_compiled_and_end_with_one_for_everything():
    compiler = Compiler()
    (ranked,) = rank(forward(64), compile_one=compiler)
    assert ranked.general[-1].when == When() and all(e.proof["registers"] == 100 for e in ranked.general)
    assert {(j.problem.head_dim, j.problem.mask) for j in compiler.jobs} >= {(256, True), (256, False), (64, False)}
    assert all(e.when.dtype for e in ranked.general[:-1])  # an entry for any dtype would hide wider ones of 16 bits


def test_a_general_entry_that_spills_everywhere_says_so_and_takes_what_spills_least():
    amounts = {}

    def compile_one(job):
        spilled = amounts.setdefault(job.tiling, 100 - len(amounts)) if job.problem.mask else 0
        return replace(SOUND, spilled=spilled)

    (ranked,) = rank(forward(64), compile_one=compile_one)
    masked = [e for e in ranked.general if e.when.mask_or_bias is not False]
    assert masked and all(e.proof["spilled_bytes"] == amounts[e.use] for e in masked)
    assert min(e.proof["spilled_bytes"] for e in masked) == min(t for t in amounts.values() if t)


# ------------------------------------------------------------------ public sources
REPORTED = """
schema: 1
device:
  slug: mi300x
  vendor: amd
  arch: gfx942
  match: {compute_units: 304}
  limits: {wave_size: 64, shared_memory_bytes: 65536, memory_gb: 192, l2_bytes: 1}
kernels:
  triton:
    forward:
      entries:
        - when: {dtype: [bf16, fp16], head_dim_le: 64, head_dim_v_le: 64, varlen: false, mask_or_bias: false}
          use: {block_m: 256, block_n: 32, num_warps: 8}
          proof: {source: reported, link: "https://example.org/figure"}
        - when: {}
          use: {block_m: 16, block_n: 16}
"""


def test_reported_tilings_stay_where_they_compile_and_go_where_they_spill(monkeypatch):
    record, public = parse(REPORTED, "test"), Tiling(256, 32, 8)
    monkeypatch.setattr(offline, "catalogue", lambda: MappingProxyType({"mi300x": record}))
    first = offline.entries(rank(forward(64, 128), MI300X))["triton", "forward"]
    assert first[0].use == public and first[0].proof["link"] == "https://example.org/figure" and first[0].proof["registers"] == 100
    assert first[1].when.head_dim_le == 128 and first[1].proof["source"] == "static"
    spilling = Compiler(lambda job: job.tiling == public)
    second = offline.entries(rank(forward(64, 128), MI300X, spilling))["triton", "forward"]
    assert public not in {e.use for e in second} and {e.proof["source"] for e in second} == {"static"}


# ------------------------------------------------------------------ a run
def test_a_spent_budget_stops_between_two_kernels_and_what_is_there_is_written(tmp_path, monkeypatch):
    said = []
    assert rank(key_set("triton"), deadline=0.0, tell=said.append) == [] and "15 of 15 kernels are left" in said[0]
    now = iter(range(100))
    monkeypatch.setattr(offline.time, "monotonic", lambda: next(now))
    ranked = rank(key_set("triton"), deadline=2, tell=said.append)
    assert len(ranked) == 2 and "13 of 15 kernels are left" in said[-1]
    path = tmp_path / "a100.yaml"
    updates = [Update(b, k, "12345678", tuple(e)) for (b, k), e in offline.entries(ranked).items()]
    bare = "\n".join(line for line in REPORTED.splitlines() if line.strip())
    text = bare.split("kernels:")[0].replace("mi300x", "a100").replace("amd", "nvidia").replace("gfx942", "sm_80")
    update_file(path, A100, text, updates, None)
    record = read(path)
    assert set(record.kernels["triton"]) == {"forward", "backward_dkv"}
    assert all(found.entries[-1].when == When() for found in record.kernels["triton"].values())


class Pretends(Inline):
    """A pool of compilers that finds everything sound."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def map(self, function, jobs):
        assert function is compiling.resources
        return [SOUND for _ in jobs]


@pytest.mark.parametrize("backend", ["triton", "hip"])
def test_the_command_writes_a_file_that_serves_every_key(backend, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiling, "pool", lambda jobs: Pretends())
    assert cli.main(["--device", "mi250x", "--backend", backend, "--offline", "--out", str(tmp_path)]) == 0
    kernels = read(tmp_path / "amd" / "mi250x.yaml").kernels[backend]
    for key in key_set(backend):
        entry = next(e for e in kernels[key.kernel].entries if e.when(key.problem()))
        assert entry.proof["source"] in ("static", "reported") and entry.proof["registers"] == 100
    assert kernels["forward"].space == backends.load(backend).space("forward")
    assert "static entries" in capsys.readouterr().err


def test_a_run_that_the_budget_ends_says_so_by_its_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compiling, "pool", lambda jobs: Pretends())
    moments = iter(range(1000))
    monkeypatch.setattr(offline.time, "monotonic", lambda: next(moments))
    assert cli.main(["--device", "a100", "--offline", "--budget", "2", "--out", str(tmp_path)]) == 3
    assert "keys are left" in capsys.readouterr().err


def test_the_catalogue_names_no_gpu_twice():
    ids = [pci_id for record in catalogue().values() for pci_id in record.pci_ids]
    assert len(ids) == len(set(ids)) > 20
