"""Maps the pseudo-API of public_reports.yaml to portable_flash: the only place where names are translated."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import yaml

import portable_flash
from portable_flash import Tiling

_DOCUMENT = yaml.safe_load((Path(__file__).parent / "public_reports.yaml").read_text())
CASES = {case["id"]: case for case in _DOCUMENT["cases"]}

# "Tuned" and "untuned" must not differ in results: two tilings that have little in common.
_TILINGS = {
    True: dict(forward=Tiling(64, 32, 4), backward_dkv=Tiling(32, 32, 4), backward_dq=Tiling(32, 64, 4)),
    False: dict(forward=Tiling(16, 64, 1), backward_dkv=Tiling(64, 16, 4, split_dkv=True), backward_dq=Tiling(64, 16, 4)),
}


class NotBuilt(Exception):
    """The case needs a public call that does not exist yet."""


def _api(backend: str | None, device: str) -> SimpleNamespace:
    def attention(query, key, value, *, attn_bias=None, **options):
        return portable_flash.attention(query, key, value, bias=attn_bias, backend=backend, **options)

    def attention_varlen(query, key, value, cu_q, cu_k, max_q, max_k, *, attn_bias=None, **options):
        options = dict(validate=device != "cpu") | options  # on the CPU the values of cu_seqlens are always checked
        return portable_flash.attention_varlen(query, key, value, cu_q, cu_k, max_q, max_k, bias=attn_bias, backend=backend, **options)

    def decode(*args, **options):
        if not hasattr(portable_flash, "attention_decode"):
            raise NotBuilt("attention_decode is not built yet")
        attn_bias = options.pop("attn_bias", None)
        return portable_flash.attention_decode(*args, **dict(causal=True, backend=backend) | options, bias=attn_bias)

    tuning = lambda on: portable_flash.tuning(_TILINGS[on])
    return SimpleNamespace(attention=attention, attention_varlen=attention_varlen, decode=decode, tuning=tuning)


def run(case: dict, backend: str | None = None, device: str = "cpu") -> None:
    """Execute a case's repro on a device; raises whatever it raises, NotBuilt when it cannot be asked yet."""
    names = {"__name__": __name__, "math": math, "torch": torch}
    prelude = _DOCUMENT["prelude"].replace("import math, torch, portable_flash as pf", "import math, torch")
    prelude = prelude.replace('DEV, f16, bf16, f32, inf, nan = "cpu",', f'DEV, f16, bf16, f32, inf, nan = "{device}",')
    assert "portable_flash" not in prelude and f'nan = "{device}"' in prelude
    names["pf"] = _api(backend, device)
    with _default_device():
        exec(compile(prelude, "public_reports.yaml prelude", "exec"), names)
        exec(compile(case["repro"], f"public_reports.yaml {case['id']}", "exec"), names)


@contextlib.contextmanager
def _default_device():
    """The prelude sets torch's default device for the whole process."""
    before = torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_device(before)
