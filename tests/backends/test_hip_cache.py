"""Compiling HIP kernels and keeping them on disk: by hiprtc and clang for real, and by a compiler made here that counts its calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tools import require, require_library, require_module

from portable_flash import cli
from portable_flash.backends.hip import cache, commands, compiler
from portable_flash.backends.hip.specialise import Kernel

TOY = '#include "toy.h"\nextern "C" __attribute__((global)) void toy(int* x) { x[index()] = PF_VALUE + EXTRA; }\n'
HEADERS = {
    "toy.h": '#pragma once\n#include "index.h"\n#if 0\n#include "elsewhere.h"\n#endif\n',
    "index.h": "#define EXTRA 1\n__attribute__((device)) inline int index() { return __builtin_amdgcn_workitem_id_x(); }\n",
    "unused.h": "#error not included\n",
}
# Writes what it is told to compile, so that two compilations of the same differ in nothing but the version asked for.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "HIP version: $FAKE_VERSION"; exit 0; fi
echo call >> "$FAKE_CALLS"
for last; do [ "$previous" = -o ] && out=$last; previous=$last; done
case "$*" in *BROKEN*) echo "$last:7: error: made to fail" >&2; exit 3;; esac
printf 'code of %s' "$*" > "$out"
"""


def toy(arch: str = "gfx90a", value: int = 1, **macros: str) -> Kernel:
    return Kernel("toy", arch, tuple(sorted({"PF_VALUE": str(value), **macros}.items())), 64, 0)


@pytest.fixture
def kernels(tmp_path, monkeypatch) -> Path:
    """A folder of sources in place of the package's, and a cache of this test's own."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, text in {"toy.hip": TOY, **HEADERS}.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(compiler, "folder", lambda: folder)
    monkeypatch.setattr(cache, "_WARNED", set())
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    for name in (cache.LIMIT_VARIABLE, cache.OBJECTS_VARIABLE, compiler.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return folder


class Counting:
    """A stand-in for hipcc, the only compiler of the test that uses it."""

    def __init__(self, folder: Path, monkeypatch):
        self.calls_file = folder / "calls"
        self.setenv = monkeypatch.setenv
        (folder / "bin").mkdir()
        (folder / "bin/hipcc").write_text(COMPILER)
        (folder / "bin/hipcc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_CALLS", str(self.calls_file))
        monkeypatch.setenv(compiler.VARIABLE, "hipcc")
        self.version("6.4.1")

    def version(self, text: str) -> None:
        compiler._command_version.cache_clear()
        self.setenv("FAKE_VERSION", text)

    @property
    def calls(self) -> int:
        return len(self.calls_file.read_text().split()) if self.calls_file.exists() else 0


@pytest.fixture
def counting(kernels, tmp_path, monkeypatch):
    yield Counting(tmp_path, monkeypatch)
    compiler._command_version.cache_clear()


def only_file() -> Path:
    (path,) = cache.cache_folder().glob("*.co")
    return path


# ---------------------------------------------------------------- compilers
def test_source_and_options(kernels):
    source = compiler.source("toy")
    assert (source.name, source.text) == ("toy.hip", TOY)
    assert source.headers == (("index.h", HEADERS["index.h"]), ("toy.h", HEADERS["toy.h"]))
    assert compiler.options(toy(value=3)) == ("--offload-arch=gfx90a", "-O3", "-std=c++17", "-ffp-contract=off", "-DPF_VALUE=3")
    with pytest.raises(ValueError, match="kernel 'forwards': there is no forwards.hip, known are toy"):
        compiler.source("forwards")


def test_clang_compiles_and_shows_its_errors(kernels):
    require("clang++-22", "clang++")
    code = compiler.compile_kernel(toy(), "clang")
    assert code.startswith(b"\x7fELF") and b"toy.kd\0" in code
    assert "clang version" in compiler.compiler_version("clang")
    with pytest.raises(compiler.CompileError) as caught:
        compiler.compile_kernel(toy(PF_VALUE="undeclared_name"), "clang")
    for text in ("toy.hip does not compile for gfx90a with clang (", "-DPF_VALUE=undeclared_name", "--offload-arch=gfx90a", "exit code 1"):
        assert text in str(caught.value)
    assert "toy.hip:2:" in str(caught.value) and "use of undeclared identifier 'undeclared_name'" in str(caught.value)


HIPRTC = """
import json, os, pathlib, sys
from portable_flash.backends.hip import cache, compiler
from portable_flash.backends.hip.specialise import Kernel
package, folder = compiler.folder(), pathlib.Path(sys.argv[1])
compiler.folder = lambda: folder
kernel = lambda arch, value: Kernel("toy", arch, (("PF_VALUE", value),), 64, 0)
first = {arch: cache.code_object(kernel(arch, "1")) for arch in ("gfx906", "gfx90a", "gfx1030")}
again = cache.code_object(kernel("gfx90a", "1"))
try:
    cache.code_object(kernel("gfx90a", "undeclared_name"))
except compiler.CompileError as error:
    failure = str(error)
machines = {arch: [found.origin, found.code[:4].hex(), b"toy.kd" in found.code, found.code[48]] for arch, found in first.items()}
print(json.dumps([compiler.choose(), machines, again.origin, again.code == first["gfx90a"].code, failure, len(cache.entries())]))
"""


def hiprtc_environment() -> dict[str, str]:
    require_module("hip")
    require_library("libamdhip64.so.5")
    return {**os.environ, "ROCM_PATH": "/nowhere"}


def test_hiprtc_compiles_caches_and_shows_its_errors(kernels):
    """In a process of its own: an old hiprtc ends the process that asks it for an arch it does not know."""
    command = [sys.executable, "-c", HIPRTC, str(kernels)]
    done = subprocess.run(command, env=hiprtc_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    chosen, machines, again, same, failure, count = json.loads(done.stdout.splitlines()[-1])
    assert chosen == "hiprtc" and same and count == 3 and again.startswith("cache: ")
    for arch, machine in {"gfx906": 0x2F, "gfx90a": 0x3F, "gfx1030": 0x36}.items():  # EF_AMDGPU_MACH_* of LLVM's AMDGPU guide
        origin, magic, kernel, flags = machines[arch]
        assert origin.startswith("compiled by hiprtc 9.0 (") and (magic, kernel, flags) == ("7f454c46", True, machine), arch
    for text in ("toy.hip does not compile for gfx90a with hiprtc 9.0 (", "-DPF_VALUE=undeclared_name", "use of undeclared identifier"):
        assert text in failure


PACKAGE = """
import sys, torch
from portable_flash.backends.hip import commands, compiler
found = {kernel.name: kernel for kernel in commands.kernels_for(sys.argv[1], (64,), (torch.float16,))}
for name, kernel in found.items():
    assert f"{name}.kd".encode() in compiler.compile_kernel(kernel, "hiprtc"), name
print(*found)
"""


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1030"])
def test_hiprtc_compiles_the_packages_kernels(arch):
    """An old one (clang 15): whatever it understands, those of later ROCm do."""
    command = [sys.executable, "-c", PACKAGE, arch]
    done = subprocess.run(command, env=hiprtc_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"forward", "backward_delta", "backward_dkv", "backward_dq"} == set(done.stdout.split())


def test_the_choice_of_a_compiler(counting, monkeypatch):
    assert compiler.choose() == "hipcc"
    monkeypatch.setenv(compiler.VARIABLE, "nvcc")
    with pytest.raises(ValueError, match="PORTABLE_FLASH_HIP_COMPILER='nvcc': allowed are 'hiprtc', 'hipcc', 'clang'"):
        compiler.choose()
    with pytest.raises(ValueError, match="compiler='gcc': allowed are"):
        compiler.choose("gcc")
    monkeypatch.delenv(compiler.VARIABLE)
    monkeypatch.setattr(compiler, "_missing", lambda name: None if name == "clang" else f"no {name} here")
    assert compiler.choose() == "clang"
    with pytest.raises(compiler.NoCompilerError, match="hiprtc: no hiprtc here"):
        compiler.choose("hiprtc")


# ---------------------------------------------------------------- the cache
def test_a_kernel_is_compiled_once(counting):
    first, second = cache.code_object(toy()), cache.code_object(toy())
    assert counting.calls == 1 and first.code == second.code
    assert first.origin == "compiled by HIP version: 6.4.1" and second.origin == f"cache: {only_file()}"
    assert b"--genco --no-gpu-bundle-output -nogpuinc -nogpulib --offload-arch=gfx90a -O3" in first.code and b" -DPF_VALUE=1 " in first.code


def test_what_makes_another_kernel(counting, kernels):
    """Arch, macros, the compiler's version, and any text that is included, but no other file."""
    cache.code_object(toy())
    for calls, kernel in enumerate((toy(arch="gfx942"), toy(value=2), toy(PF_MORE="1")), start=2):
        cache.code_object(kernel)
        assert counting.calls == calls
    counting.version("6.4.2")
    cache.code_object(toy())
    assert counting.calls == 5
    (kernels / "unused.h").write_text("// changed")
    cache.code_object(toy())
    assert counting.calls == 5
    (kernels / "index.h").write_text("// changed")
    cache.code_object(toy())
    assert counting.calls == 6


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_file_is_compiled_again_with_one_warning(counting, damage):
    code = cache.code_object(toy()).code
    path = only_file()
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-5], "flipped": whole[:-1] + b"?", "empty": b"", "text": b"no code object"}[damage])
    assert [entry.facts for entry in cache.entries()] == [None]
    with pytest.warns(RuntimeWarning, match="a cached kernel was damaged and is compiled again: .*toy-gfx90a"):
        assert cache.code_object(toy()).code == code
    assert counting.calls == 2 and path.read_bytes()[-20:] == whole[-20:]
    path.write_bytes(b"damaged again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.code_object(toy()).code == code
    assert counting.calls == 3


def test_without_a_place_to_write_each_process_compiles(counting, tmp_path, monkeypatch):
    """A file in place of the folder stops every user, root too."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept in .*file/hip, each process compiles them: "):
        first = cache.code_object(toy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.code_object(toy()).code == first.code
    assert counting.calls == 2 and cache.entries() == []


def test_a_full_disk_leaves_nothing_behind(counting, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.code_object(toy())
    assert list(cache.cache_folder().iterdir()) == []


def test_the_kernels_used_longest_ago_are_evicted(counting, monkeypatch):
    """A look-up counts as a use; the newest stays whatever its size."""
    for value in range(4):
        cache.code_object(toy(value=value))
        for entry in cache.entries():  # an hour older each
            os.utime(entry.path, (entry.used - 3600,) * 2)
    cache.code_object(toy(value=0))
    size = cache.entries()[0].size
    assert cache.evict(2 * size + 20) == 2
    assert sorted(entry.facts.macros for entry in cache.entries()) == ["PF_VALUE=0", "PF_VALUE=3"]
    stale, fresh = (cache.cache_folder() / f".{name}.tmp" for name in ("stale", "fresh"))
    for path, age in ((stale, 10**6), (fresh, 10)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    monkeypatch.setenv(cache.LIMIT_VARIABLE, "0")
    cache.code_object(toy(value=9))
    assert [entry.facts.macros for entry in cache.entries()] == ["PF_VALUE=9"]
    assert fresh.exists() and not stale.exists()
    monkeypatch.setenv(cache.LIMIT_VARIABLE, "1 GB")
    with pytest.raises(ValueError, match="PORTABLE_FLASH_CACHE_MB='1 GB': must be a whole number of megabytes"):
        cache.limit_bytes()


PROCESS = """
import hashlib, pathlib, sys
from portable_flash.backends.hip import cache, compiler
from portable_flash.backends.hip.specialise import Kernel
folder = pathlib.Path(sys.argv[1])
compiler.folder = lambda: folder
for round in range(40):
    for value in range(3):
        code = cache.code_object(Kernel("toy", "gfx90a", (("PF_VALUE", str(value)),), 64, 0)).code
        assert b"-DPF_VALUE=%d " % value in code
    if round % 10 == int(sys.argv[2]):
        cache.clear()
"""


def test_eight_processes_share_a_cache(counting, kernels):
    """While each clears it now and then: every look-up gives its kernel, and never a warning."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS, str(kernels)]
    processes = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE, text=True) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        errors = list(pool.map(lambda process: process.communicate(timeout=300)[1], processes))
    assert [(process.returncode, error) for process, error in zip(processes, errors)] == [(0, "")] * 8
    assert not list(cache.cache_folder().glob("*.tmp")) and all(entry.facts for entry in cache.entries())


def test_folders(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "portable_flash/hip"
    monkeypatch.setenv(cache.FOLDER_VARIABLE, "~/mine")
    assert cache.cache_folder() == Path.home() / "mine/hip"


# ---------------------------------------------------------------- prebuilt objects and commands
@pytest.fixture
def toys(counting, monkeypatch):
    """`build` builds toys."""
    monkeypatch.setattr(commands, "kernels_for", lambda arch, head_dims, dtypes: tuple(toy(arch, value) for value in head_dims))
    return counting


def test_prebuilt_objects_need_no_compiler(toys, tmp_path, monkeypatch, capsys):
    out = tmp_path / "objects"
    assert cli.main(["build", "--arch", "gfx90a", "--arch", "gfx1030", "--head-dim", "64", "--head-dim", "80", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "4 kernels with HIP version: 6.4.1, into " in printed and "[4/4] toy gfx1030: " in printed and f"HIP_OBJECTS={out}" in printed
    assert len(list(out.iterdir())) == 4 and cache.entries() == []

    monkeypatch.setattr(compiler, "_missing", lambda name: f"no {name} here")
    assert "no compiler" in cache.unavailable() and "portable-flash build" in cache.unavailable()
    with pytest.raises(compiler.NoCompilerError):
        cache.code_object(toy("gfx90a", 64))
    monkeypatch.setenv(cache.OBJECTS_VARIABLE, f"{tmp_path / 'nothing'}{os.pathsep}{out}")
    assert cache.unavailable() is None
    found = cache.code_object(toy("gfx1030", 80))
    assert found.origin.startswith(f"prebuilt: {out}") and b"--offload-arch=gfx1030" in found.code
    with pytest.raises(compiler.NoCompilerError):
        cache.code_object(toy("gfx1030", 81))

    (out / cache.object_name(toy("gfx1030", 80))).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="a prebuilt kernel is damaged and not used"), pytest.raises(compiler.NoCompilerError):
        cache.code_object(toy("gfx1030", 80))
    assert (out / cache.object_name(toy("gfx1030", 80))).exists(), "a folder of prebuilt objects is only read"


def test_build_goes_on_after_a_failure_and_says_so(toys, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "kernels_for", lambda *_: (toy(value=1), toy(PF_BROKEN="1"), toy(value=2)))
    assert cli.main(["build", "--arch", "gfx90a", "--out", str(tmp_path / "objects")]) == 1
    printed = capsys.readouterr()
    assert "[2/3] toy gfx90a: FAILED: toy.hip does not compile" in printed.err and "made to fail" in printed.err
    assert "1 of 3 kernels could not be built" in printed.err and "[3/3] toy gfx90a: " in printed.out
    assert len(list((tmp_path / "objects").iterdir())) == 2
    (tmp_path / "file").write_text("")
    assert cli.main(["build", "--arch", "gfx90a", "--out", str(tmp_path / "file")]) == 1
    assert "portable-flash build: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--arch"),
        (["--arch", "gfx803"], "gfx803"),
        (["--arch", "gfx942", "--head-dim", "0"], "must be 1 to 256"),
        (["--arch", "gfx942", "--dtype", "int8"], "int8"),
        (["--arch", "gfx942", "--compiler", "gcc"], "gcc"),
    ],
)
def test_build_refuses_what_it_cannot_do(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["build", *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_the_cache_command(counting, capsys):
    assert cli.main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(cache.cache_folder())
    assert cli.main(["cache", "list"]) == 0 and "0 kernels, 0.0 MB" in capsys.readouterr().out
    cache.code_object(toy())
    cache.code_object(toy("gfx1030"))
    os.utime(cache.entries()[0].path, (time.time() - 7300,) * 2)
    (cache.cache_folder() / "damaged.co").write_bytes(b"?")
    assert cli.main(["cache", "list"]) == 0
    printed = capsys.readouterr().out
    assert "toy              gfx90a " in printed and "2 h ago" in printed and "HIP version: 6.4.1; PF_VALUE=1" in printed
    assert "damaged" in printed and "3 kernels, 0.0 MB" in printed and "kept under 512 MB" in printed
    assert cli.main(["cache", "clear"]) == 0 and "removed 3 compiled kernels" in capsys.readouterr().out
    assert cache.entries() == []
    with pytest.raises(SystemExit):
        cli.main(["cache", "everything"])


def test_devices_of_every_arch():
    for arch in commands.ARCHES:
        devices = commands.devices_of(arch)
        assert devices and all(device.arch == arch and device.shared_memory_bytes >= 65536 for device in devices)
    assert {"mi300x", "mi325x"} <= {device.slug for device in commands.devices_of("gfx942")}
