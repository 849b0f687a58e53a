"""The journal's file: shared, torn, locked, and without its library."""

import multiprocessing
import os
import sys
import time

import pytest

from portable_flash.tiling import Tiling
from portable_flash.tune import cli
from portable_flash.tune.journal import Journal, JournalError, Record, reopen
from portable_flash.tune.keys import Key, key_set

KEY = Key("triton", "forward", "bf16", 64, False, 512)
TILINGS = [Tiling(64, 64, 4, s, tma=tma) for s in (1, 2, 3) for tma in (False, True)]


def test_what_optuna_shows_is_the_search(tmp_path):
    optuna = pytest.importorskip("optuna")
    path = tmp_path / "journal"
    journal = Journal(path, {"device": "x"}, about={"driver": "1"})
    for tiling in TILINGS[:3]:
        journal.put(Record("check", KEY, tiling, [{"ok": True}, ""]))
    journal.put(*(Record("time", KEY, t, [1.0, 2.0, 9.0], 0) for t in TILINGS[:2]), Record("time", KEY, TILINGS[0], [3.0], 100))
    journal.finish(KEY, {TILINGS[0]: 3.0}, [TILINGS[2]])
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    trials = optuna.load_study(study_name=str(KEY), storage=storage).trials
    assert [t.state.name for t in trials] == ["COMPLETE", "PRUNED", "FAIL"] and trials[0].value == 3.0
    assert trials[0].params == TILINGS[0].as_dict() and trials[0].intermediate_values == {0: 2.0, 100: 3.0}
    again, identity, about = reopen(path)
    assert again.known == journal.known and identity["device"] == "x" and about == {"driver": "1"}
    more = Journal(path, {"device": "x"}, resume=True)
    more.put(Record("probe", KEY, TILINGS[0], [{"ok": True}, ""]))  # a trial that is finished is not closed to what comes later
    assert reopen(path)[0].get("probe", KEY, TILINGS[0]) == [{"ok": True}, ""]


def _write(path, number, barrier):
    journal = Journal(path, {}, resume=True)
    barrier.wait()
    for key in key_set("triton", kernels=("forward",), dtypes=("bf16",))[number::4]:
        journal.put(*(Record("time", key, t, [float(number)], 0) for t in TILINGS))
        journal.finish(key, {}, ())


def test_four_processes_share_a_journal_and_each_learns_from_the_others(tmp_path):
    path = tmp_path / "journal"
    watcher = Journal(path, {})
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    barrier = context.Barrier(4)
    writers = [context.Process(target=_write, args=(path, n, barrier)) for n in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(120)
    assert [one.exitcode for one in writers] == [0] * 4 and not watcher.known
    watcher.refresh()
    keys = key_set("triton", kernels=("forward",), dtypes=("bf16",))
    assert {k: watcher.get("time", k, TILINGS[0]) for k in keys} == {k: [float(i % 4)] for i, k in enumerate(keys)}
    assert watcher.known == reopen(path)[0].known and len(watcher.known) == len(keys) * len(TILINGS)


def test_what_a_crash_tore_is_cut_off_so_that_the_next_line_is_whole(tmp_path):
    path = tmp_path / "journal"
    Journal(path, {}).put(Record("time", KEY, TILINGS[0], [1.0]))
    with path.open("a") as file:
        file.write('{"op_code": 8, "torn')
    Journal(path, {}, resume=True).put(Record("time", KEY, TILINGS[1], [2.0]))
    assert [reopen(path)[0].get("time", KEY, t) for t in TILINGS[:2]] == [[1.0], [2.0]]


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    journal = Journal(path, {})
    journal._store.backend.lock.grace_period = 0.2
    path.with_name("journal.lock").touch()
    start = time.monotonic()
    journal.put(Record("time", KEY, TILINGS[0], [1.0]))
    assert 0.1 < time.monotonic() - start < 20 and reopen(path)[0].get("time", KEY, TILINGS[0]) == [1.0]


@pytest.mark.parametrize("text", ["\n", "{}\n", '{"op_code": 4}\n', "\x00\x01\n\n"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(text, tmp_path):
    path = tmp_path / "journal"
    path.write_text(text)
    for use in (lambda: Journal(path, {}, resume=True), lambda: reopen(path)):
        with pytest.raises(JournalError, match="journal"):
            use()
    assert path.read_text() == text
    with pytest.raises(JournalError, match="does not exist"):
        reopen(tmp_path / "none")


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"file/journal: .*(File exists|Not a directory)"):
        Journal(tmp_path / "file" / "journal", {})


def test_without_optuna_a_run_says_what_to_install_and_looking_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RuntimeError, match=r"portable-flash\[tune\]"):
        Journal(tmp_path / "journal", {})
    for argv in (["--list"], ["--stale"], ["--dry-run"], ["--explain", str(KEY)]):
        assert cli.main(["--device", "h200", "--out", str(tmp_path), "--keys", str(KEY), *argv]) == 0
    assert capsys.readouterr().out
