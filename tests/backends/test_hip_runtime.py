"""The HIP backend's use of a HIP library, shown with libraries made here that record what is called.

Each scene runs in a process of its own: hip-python opens a library once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tools import require, require_library, require_module

HIP_LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int device = 0, last_error = 0;
static void record(const char* text) {
    FILE* file = fopen(getenv("FAKE_HIP_LOG"), "a");
    fprintf(file, "%s: %s\n", NAME, text);
    fclose(file);
}
static int status(const char* call) {  /* FAKE_HIP_FAIL="call=code" */
    const char* fail = getenv("FAKE_HIP_FAIL");
    size_t n = strlen(call);
    record(call);
    last_error = fail && !strncmp(fail, call, n) && fail[n] == '=' ? atoi(fail + n + 1) : 0;
    return last_error;
}
const char* hipGetErrorName(int e) { return e == 0 ? "hipSuccess" : e == 209 ? "hipErrorNoBinaryForGpu" : "hipErrorOther"; }
const char* hipGetErrorString(int e) { return e == 209 ? "no kernel image is available for execution on the device" : "other"; }
int hipGetLastError(void) { record("hipGetLastError"); return last_error; }
int hipRuntimeGetVersion(int* v) { *v = 60443484; return status("hipRuntimeGetVersion"); }
int hipGetDevice(int* d) { *d = device; return 0; }
int hipSetDevice(int d) { char text[64]; device = d; sprintf(text, "hipSetDevice %d", d); record(text); return 0; }
int hipModuleLoadData(void** module, const char* image) {
    char text[128];
    *module = (void*)0x1000;
    sprintf(text, "image %.8s on %d", image, device);
    record(text);
    return status("hipModuleLoadData");
}
int hipModuleGetFunction(void** f, void* module, const char* name) {
    char text[128];
    *f = (void*)0x2000;
    sprintf(text, "function %s of %p", name, module);
    record(text);
    return status("hipModuleGetFunction");
}
int hipModuleLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned lds,
                          void* stream, void** params, void** extra) {
    char text[256];
    size_t size = *(size_t*)extra[3];
    sprintf(text, "launch %p grid %u %u %u block %u %u %u lds %u stream %p params %p extra %d %d %d size %d: %s", f, gx, gy, gz, bx, by, bz,
            lds, stream, (void*)params, (int)(size_t)extra[0], (int)(size_t)extra[2], (int)(size_t)extra[4], (int)size, (char*)extra[1]);
    record(text);
    return status("hipModuleLaunchKernel");
}
"""
HIPRTC_LIBRARY = r"""
#include <stdlib.h>
const char* hiprtcGetErrorString(int e) { return e ? "HIPRTC_ERROR" : "HIPRTC_SUCCESS"; }
int hiprtcVersion(int* major, int* minor) { *major = 9; *minor = 0; return 0; }
int hiprtcCreateProgram(void) { abort(); }
"""
TORCH_LIBRARY = "int hipGetDevice(int*); int c10_hip_device(void) { int d; return hipGetDevice(&d), d; }"
SCENE = """
import ctypes, json, os, pathlib, sys, warnings
from portable_flash.backends.hip import cache, compiler, runtime
from portable_flash.backends.hip.specialise import Kernel
KERNEL = Kernel("forward", "gfx942", (("A", "1"),), 256, 0)
cache.code_object = lambda kernel: cache.CodeObject(b"\\x7fELFcode" + bytes(64), "test")
try:
    result = scene()
except Exception as error:
    result = {"error": type(error).__name__, "text": str(error)}
print(json.dumps(result))
"""


def build(path: Path, text: str, *options: str) -> Path:
    """A shared library of this C text; its name is also what dlopen knows it by."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(text)
    named = ["-o", path, f"-Wl,-soname,{path.name}", f'-DNAME="{path.parent.name}"']
    subprocess.run([require("gcc", "cc"), "-shared", "-fPIC", *named, source, *options], check=True)
    return path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    """torch/ and system/, each with HIP and hiprtc; torch's HIP is bound to by a library named like torch's own."""
    require_module("hip")
    folder = tmp_path_factory.mktemp("libraries")
    hip = build(folder / "torch/libamdhip64.so", HIP_LIBRARY)
    build(folder / "torch/libhiprtc.so", HIPRTC_LIBRARY)
    found = (f"-L{hip.parent}", f"-Wl,--disable-new-dtags,-rpath,{hip.parent}")
    build(folder / "torch/libc10_hip.so", TORCH_LIBRARY, *found, "-lamdhip64")
    build(folder / "system/lib/libamdhip64.so", HIP_LIBRARY)
    build(folder / "system/lib/libhiprtc.so", HIPRTC_LIBRARY)
    build(folder / "other/libamdhip64.so.6", HIP_LIBRARY)
    return folder


@pytest.fixture
def play(tmp_path, libraries):
    """Run the body of a function, given in parts; what it returns, and the lines that the libraries recorded."""

    def run(*body: str, **environment: str) -> tuple[Any, list[str]]:
        log = tmp_path / "log"
        log.write_text("")
        lines = "\n".join(textwrap.dedent(part) for part in body)
        text = f"L = {str(libraries)!r}\ndef scene():\n{textwrap.indent(lines, '    ')}\n{SCENE}"
        cleared = ("ROCM_PATH", "ROCM_HOME", "LD_LIBRARY_PATH", "PORTABLE_FLASH_HIP_COMPILER", "PORTABLE_FLASH_HIP_OBJECTS")
        kept = {name: value for name, value in os.environ.items() if name not in cleared}
        env = {**kept, "FAKE_HIP_LOG": str(log), "ROCM_PATH": str(tmp_path / "none"), "PORTABLE_FLASH_CACHE": str(tmp_path), **environment}
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1]), log.read_text().splitlines()

    return run


TORCH_LOADED = 'ctypes.CDLL(L + "/torch/libc10_hip.so")\n'


def test_the_library_that_torch_loaded_is_used(play, libraries):
    """Also where another copy is installed, is first in the linker's path, and is loaded too."""
    result, log = play(
        TORCH_LOADED,
        """
        ctypes.CDLL(L + "/other/libamdhip64.so.6")
        reason = runtime.unavailable()
        before = open(os.environ['FAKE_HIP_LOG']).read()
        library = runtime.library_in_use()
        return [reason, before, library.path, library.version, library.origin, runtime.hiprtc()[1], runtime.loaded('amdhip64')]
        """,
        ROCM_PATH=str(libraries / "system"),
        LD_LIBRARY_PATH=str(libraries / "system/lib"),
    )
    torchs, other = str(libraries / "torch/libamdhip64.so"), str(libraries / "other/libamdhip64.so.6")
    assert result[:6] == [None, "", torchs, "6.4.43484", "loaded by torch", str(libraries / "torch/libhiprtc.so")]
    assert set(result[6]) == {torchs, other}, "the installed copy was loaded too"
    assert log == ["torch: hipRuntimeGetVersion"]


def test_an_installed_library_is_used_where_torch_has_none(play, libraries):
    body = "library = runtime.library_in_use()\nreturn [library.path, library.origin, runtime.hiprtc()[1]]"
    folder = libraries / "system/lib"
    expected = [str(folder / "libamdhip64.so"), "installed", str(folder / "libhiprtc.so")]
    assert play(body, ROCM_PATH=str(libraries / "system"))[0] == expected
    assert play(body, LD_LIBRARY_PATH=str(folder), ROCM_PATH="/nowhere")[0] == expected


def test_a_kernel_is_loaded_once_and_launched(play):
    """On the device asked for, the caller's being current again afterwards; HIP counts work-items in 32 bits."""
    result, log = play(
        TORCH_LOADED,
        """
        first = runtime.function(KERNEL, 1)
        same = runtime.function(Kernel("forward", "gfx942", (("A", "1"),), 256, 0), 1) is first
        runtime.launch(first, 7, b"arguments", 0xabc0)
        runtime.launch(first, 0, b"arguments", 0)
        runtime.launch(runtime.function(KERNEL, 0), 2**24 - 1, b"", 0)
        try:
            runtime.launch(first, 2**24, b"", 0)
        except ValueError as error:
            return [same, first.device_index, str(error)]
        """,
    )
    text = "programs=16777216: forward has 256 work-items a program, so a launch takes at most 16777215: split the batch"
    assert result == [True, 1, text]
    assert [line.removeprefix("torch: ") for line in log] == [
        "hipSetDevice 1", "image \x7fELFcode on 1", "hipModuleLoadData", "function forward of 0x1000", "hipModuleGetFunction",
        "hipSetDevice 0",
        "launch 0x2000 grid 7 1 1 block 256 1 1 lds 0 stream 0xabc0 params (nil) extra 1 2 3 size 9: arguments", "hipModuleLaunchKernel",
        "image \x7fELFcode on 0", "hipModuleLoadData", "function forward of 0x1000", "hipModuleGetFunction",
        "launch 0x2000 grid 16777215 1 1 block 256 1 1 lds 0 stream (nil) params (nil) extra 1 2 3 size 0: ", "hipModuleLaunchKernel",
    ]  # fmt: skip


def test_a_failed_call_is_an_error_with_its_name_and_text(play):
    """The device is the caller's again, and HIP does not keep the error for torch's next launch."""
    failures = {"hipModuleLoadData": 209, "hipModuleGetFunction": 123456, "hipModuleLaunchKernel": 9, "hipRuntimeGetVersion": 3}
    result, log = play(
        TORCH_LOADED,
        f"failures = {failures}",
        """
        texts = []
        for call, code in failures.items():
            os.environ["FAKE_HIP_FAIL"] = f"{call}={code}"
            try:
                runtime.launch(runtime.function(KERNEL, 1), 7, b"arguments", 0)
                runtime.library_in_use()
            except runtime.HipError as error:
                texts.append(str(error))
        return texts
        """,
    )
    assert result == [
        "hipModuleLoadData of forward for gfx942 on device 1 failed: hipErrorNoBinaryForGpu (209), "
        "no kernel image is available for execution on the device",
        "hipModuleGetFunction of forward for gfx942 on device 1 failed with an error of its own: 123456 is not a valid hipError_t",
        "hipModuleLaunchKernel failed: hipErrorOther (9), other",
        "hipRuntimeGetVersion failed: hipErrorOther (3), other",
    ]  # fmt: skip
    assert log.count("torch: hipGetLastError") == 4
    assert log.count("torch: hipSetDevice 0") == log.count("torch: hipSetDevice 1") == 3


def test_what_is_missing_is_said(play, libraries, tmp_path):
    result, _ = play("sys.modules['hip'] = None\nreturn runtime.unavailable()")
    assert "hip-python is not installed (pip install portable-flash[hip])" in result
    body = "runtime._VERSIONS = ('.none',)\nreturn [runtime.unavailable(), compiler.choose()]"
    result, _ = play(body, PATH=str(tmp_path))
    assert result["error"] == "NoCompilerError"
    for text in ("hiprtc: no hiprtc library: no HIP library", "hipcc: no hipcc on PATH", "clang: no clang++-22 or", str(tmp_path / "none")):
        assert text in result["text"]
    result, _ = play("runtime._VERSIONS = ('.none',)\nreturn runtime.unavailable()")
    assert result.startswith("no HIP library: torch has loaded none (a torch for ROCm brings its own), and none is in ")
    assert str(tmp_path / "none/lib") in result and "libamdhip64.so.none" in result


def test_two_libraries_are_never_mixed(play):
    """hip-python may have been called before, with a copy that is not torch's; and without torch nobody can say which copy is meant."""
    earlier = """
        from hip import hip
        runtime._direct(hip, "amdhip64", L + "/other/libamdhip64.so.6")
        hip.hipRuntimeGetVersion()
        """
    result, _ = play(earlier, TORCH_LOADED, "return runtime.unavailable()")
    assert "hip-python already calls" in result and "/other/libamdhip64.so.6 as libamdhip64" in result and "/torch/libamdhip64.so" in result
    both = 'ctypes.CDLL(L + "/other/libamdhip64.so.6")\nctypes.CDLL(L + "/system/lib/libamdhip64.so")\nreturn runtime.unavailable()'
    result, _ = play(both)
    assert result.startswith("several HIP libraries are loaded in this process, and torch uses none: ")


def test_a_library_without_hip_in_it_is_refused(play, tmp_path):
    build(tmp_path / "none/lib/libamdhip64.so", "int nothing;")
    result, _ = play("return runtime.unavailable()")
    assert "is no HIP library: it has no hipModuleLaunchKernel" in result


def test_a_real_library_without_a_gpu(play):
    """ROCm 5 has hiprtc inside its HIP library; without a GPU nothing can be loaded, and that is said in HIP's words."""
    require_library("libamdhip64.so.5")
    result, _ = play(
        """
        library = runtime.library_in_use()
        assert runtime.hiprtc()[1] == library.path, runtime.hiprtc()
        try:
            runtime.load(KERNEL, 0, b"")
        except runtime.HipError as error:
            return [library.version, str(error)]
        """,
        ROCM_PATH="/nowhere",
    )
    assert result[0].startswith("5.")
    assert result[1].startswith(("hipGetDevice failed: hipError", "hipModuleLoadData of forward for gfx942 on device 0 failed: hipError"))
