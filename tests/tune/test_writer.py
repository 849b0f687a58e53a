"""Entries into the file: text, merge, order, locks, and what is left when something fails."""

import errno
import multiprocessing
import os
import re

import filelock
import pytest
import torch

from portable_flash.database import Blocked, DatabaseError, When, parse, read
from portable_flash.device import catalogue, named
from portable_flash.problem import Problem
from portable_flash.tiling import KERNELS, Tiling
from portable_flash.tune import writer
from portable_flash.tune.keys import Key, key_set
from portable_flash.tune.merge import Cell, Choice
from portable_flash.tune.writer import Update, WriteError, ensure_writable, path_of, tiling_entry, update_file
from portable_flash.tuning import clear_caches, lookup, user_folder

H200, MI300X = named("h200"), named("mi300x")


def update(keys, tiling=Tiling(64, 64, 4, 2), space="11111111", kernel="forward", **proof):
    entries = tuple(tiling_entry(k.when(), tiling, source="measured", median_us=1.5, **proof) for k in keys)
    return Update("triton", kernel, space, entries)


def keys(**changes):
    return key_set("triton", **{"kernels": ("forward",), **changes})


def first(record, key, kernel="forward"):
    return next(e.use for e in record.kernels["triton"][kernel].entries if e.when(key.problem()))


def test_a_new_file_starts_from_the_shipped_one_and_can_be_read(tmp_path):
    shipped = catalogue()["mi300x"]
    path = path_of(tmp_path, MI300X)
    from portable_flash.tune.running import shipped_text

    update_file(path, MI300X, shipped_text(MI300X), [update(keys(head_dims=(64,)))], {"triton": "3.6.0", "date": "2026-01-01"})
    record = read(path)
    assert (record.slug, record.pci_ids, record.limits) == ("mi300x", shipped.pci_ids, shipped.limits)
    assert "Infinity Cache" in path.read_text() and record.measured_with["triton"] == "3.6.0"
    assert record.kernels["triton"]["forward"].entries[-1].when == When()


def test_every_key_finds_its_own_entry_whatever_the_order_of_merging(tmp_path):
    every = keys()
    tilings = [Tiling(64, 64, 4, 2), Tiling(128, 64, 8, 2), Tiling(64, 32, 4, 3), Tiling(32, 32, 4, 1)]
    own = {key: tilings[hash(key) % 4] for key in every}
    texts = []
    for order in (every, every[::-1]):
        path = tmp_path / str(len(texts)) / "h200.yaml"
        for key in order[::40]:
            update_file(path, H200, None, [update([key], own[key])], None)
        entries = tuple(e for k in order for e in update([k], own[k]).entries)
        update_file(path, H200, None, [Update("triton", "forward", "11111111", entries)], None)
        texts.append(path.read_text())
        record = read(path)
        assert [k for k in every if first(record, k) != own[k]] == []
    assert texts[0] == texts[1]


def test_what_is_not_of_the_update_stays(tmp_path):
    path = tmp_path / "h200.yaml"
    blocked = Blocked({"block_m": 64, "num_warps": 8}, 'wrong "dv": #1', "https://example.org/1")
    both = Update("triton", "forward", "11111111", update(keys()).entries, blocked=(blocked,))
    update_file(path, H200, None, [both], {"triton": "3.6.0"})
    update_file(path, H200, None, [update(keys(), Tiling(32, 32), kernel="backward_dq", space="2")], None)
    update_file(path, H200, None, [update(keys(head_dims=(64,)), Tiling(128, 128, 8, 2, tma=True))], None)
    record = read(path)
    forward = record.kernels["triton"]["forward"]
    assert forward.blocked == (blocked,) and record.measured_with == {"triton": "3.6.0"}
    assert first(record, keys(head_dims=(64,))[0]) == Tiling(128, 128, 8, 2, tma=True)
    assert first(record, keys(head_dims=(128,))[0]) == Tiling(64, 64, 4, 2)
    assert first(record, keys()[0], "backward_dq") == Tiling(32, 32)


def test_entries_of_an_older_kernel_go(tmp_path):
    path = tmp_path / "h200.yaml"
    update_file(path, H200, None, [update(keys(head_dims=(64,)))], None)
    update_file(path, H200, None, [update(keys(head_dims=(128,)), space="22222222")], None)
    found = read(path).kernels["triton"]["forward"]
    assert found.space == "22222222" and not any(e.when == keys(head_dims=(64,))[0].when() for e in found.entries)


def test_a_general_entry_is_found_by_calls_that_no_key_stands_for(tmp_path):
    path = tmp_path / "h200.yaml"
    update_file(path, H200, None, [Update("triton", k, "1", update(keys()).entries) for k in KERNELS], None)
    record = read(path)
    packed = Problem(torch.bfloat16, 4, 16, 16, 1024, 1024, 64, 64, varlen=True, total_q=4000, total_k=4000)
    sizes = (1, 8, 8, 512, 512, 64, 64)
    for problem in (packed, Problem(torch.float32, *sizes), Problem(torch.float16, *sizes, mask=True)):
        for kernel in KERNELS:
            use = next(e.use for e in record.kernels["triton"][kernel].entries if e.when(problem))
            assert not use.tma or not (problem.varlen or problem.mask)
            assert use.unfit(kernel, problem, H200) is None


def test_the_user_file_is_the_first_rung_of_the_ladder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    key, own = keys(head_dims=(64,), buckets=(2048,))[0], Tiling(64, 32, 4, 2)
    update_file(path_of(user_folder(), H200), H200, None, [update([key], own)], None)
    clear_caches()
    try:
        plan = lookup("forward", key.problem(), H200, "11111111")
        assert plan.tiling == own and plan.source.startswith("user file")
    finally:
        clear_caches()


@pytest.mark.parametrize(
    "text", ["plain", "a: b", "#x", "null", "yes", '"quoted" \\ back', "line\nbreak\x00", "123", "1e5", "2026-01-01", "{x}", "&a *b !c"]
)
def test_any_reason_is_written_as_the_text_it_is(text, tmp_path):
    path = tmp_path / "h200.yaml"
    update_file(path, H200, None, [Update("triton", "forward", "1", blocked=(Blocked({"block_m": 64}, text),))], None)
    assert read(path).kernels["triton"]["forward"].blocked[0].reason == re.sub(r"[\n\x00]", " ", text)


# ------------------------------------------------------------------ hostile files
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("!!python/object/apply:os.system ['touch {mark}']", "tags are not allowed"), ("a: &x [1]\nb: *x", "anchors and aliases"),
        ("[" * 50 + "]" * 50, "nested deeper"), ("schema: 1\ndevice: {slug: h200", "not YAML"), ("", "empty"), ("\x00", "not YAML"),
        ("x: " + "y" * (1 << 20), "larger than|unknown field"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_and_left_alone(text, says, tmp_path):
    path, mark = tmp_path / "h200.yaml", tmp_path / "mark"
    text = text.replace("{mark}", str(mark))
    path.write_text(text)
    with pytest.raises(DatabaseError, match=says):
        update_file(path, H200, None, [update(keys())], None)
    assert path.read_text() == text and not mark.exists()


def test_the_file_of_another_gpu_is_refused(tmp_path):
    path = tmp_path / "h200.yaml"
    update_file(path, MI300X, None, [], None)
    with pytest.raises(DatabaseError, match="of amd/mi300x"):
        update_file(path, H200, None, [update(keys())], None)


# ------------------------------------------------------------------ locks and disks
SHARED = keys(head_dims=(64, 128))


def _tiling(place):
    return Tiling(64, 32 if place % 3 else 64, 4, 2)


def _add(path, number, barrier):
    barrier.wait()
    for place in range(number, len(SHARED), 8):
        choice = Choice(_tiling(place), {"source": "measured", "median_us": 1.5})
        update_file(path, H200, None, [Update("triton", "forward", "11111111", cells=(Cell(SHARED[place], (choice,)),))], None)


def test_eight_processes_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    barrier, path = context.Barrier(8), tmp_path / "nvidia" / "h200.yaml"
    writers = [context.Process(target=_add, args=(path, n, barrier)) for n in range(8)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(300)
    assert [one.exitcode for one in writers] == [0] * 8
    record = read(path)
    assert [k for i, k in enumerate(SHARED) if first(record, k) != _tiling(i)] == []
    spoken = [e.proof.get("keys", 1) for e in record.kernels["triton"]["forward"].entries if e.proof["source"] == "measured"]
    assert len(SHARED) // 2 < sum(spoken) <= len(SHARED)  # cautious: who was measured in an entry that was split is not written down
    assert sorted(p.name for p in path.parent.iterdir() if not p.name.endswith("lock")) == ["h200.yaml"]


def test_a_lock_that_is_held_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "h200.yaml"
    with filelock.FileLock(f"{path}.lock"), pytest.raises(WriteError, match="holds this lock"), writer.locked(path, timeout_s=0.1):
        pass


def test_a_file_system_without_locks_gets_a_lock_file(tmp_path, monkeypatch):
    def refuse(self, *arguments, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    path = tmp_path / "h200.yaml"
    with writer.locked(path):
        assert path.with_name("h200.yaml.softlock").exists()
        with pytest.raises(WriteError, match="softlock"), writer.locked(path, timeout_s=0.1):
            pass
    update_file(path, H200, None, [update(keys())], None)
    assert read(path).slug == "h200"


def test_a_failing_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "h200.yaml"
    update_file(path, H200, None, [update(keys())], None)
    before = path.read_text()

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        update_file(path, H200, None, [update(keys(), Tiling(32, 32))], None)
    assert path.read_text() == before and sorted(p.name for p in tmp_path.iterdir() if "lock" not in p.name) == ["h200.yaml"]


def test_a_folder_that_cannot_be_written_is_found_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="--out"):
        ensure_writable(tmp_path / "file" / "nvidia" / "h200.yaml")
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(WriteError, match="--out"):
            ensure_writable(tmp_path / "nvidia" / "h200.yaml")


def test_what_is_written_passes_the_reader_for_every_gpu():
    for slug in catalogue():
        device = named(slug)
        backend = "triton" if device.vendor == "nvidia" else "hip"
        entries = update([Key(backend, "forward", "bf16", 64, True, 512)]).entries
        text = writer.merged_text(writer.skeleton(device), slug, device, [Update(backend, "forward", "1", entries)], None)
        assert parse(text, slug).slug == slug
