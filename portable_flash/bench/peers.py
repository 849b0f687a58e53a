"""Every implementation that is timed, behind one signature: call(query, key, value) -> output, all in layout bhsd."""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .suite import Case

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS = "ours"


class Refused(Exception):
    """An implementation cannot run this case; the message is the reason that it gave."""


@dataclass(frozen=True)
class Built:
    """An implementation made ready for one case. Calls happen inside context(), entered outside the timed region."""

    call: Call
    context: Callable[[], AbstractContextManager] = nullcontext
    note: str = ""  # what a reader must know to compare this row


@dataclass(frozen=True)
class Peer:
    """build(case, query, key, value) returns a Built or raises Refused; module is what must be importable."""

    name: str
    label: str
    build: Callable[[Case, Tensor, Tensor, Tensor], Built]
    devices: tuple[str, ...] = ("cuda",)
    module: str | None = None
    default: bool = True

    def absent(self, device: torch.device) -> str | None:
        """Why it cannot run on this machine at all; None when it may."""
        if device.type not in self.devices:
            return f"has no {device.type} version"
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a broken binary package raises OSError, RuntimeError and others beside ImportError
            return f"{self.module} cannot be imported: {first_line(error)}"
        return None


def first_line(error: BaseException) -> str:
    """The first line of a message; the second too where the first only announces it (compilers do)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]


# ---------------------------------------------------------------------- this library
def _build_ours(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Built:
    from .. import attention

    return Built(functools.partial(attention, causal=case.causal))


# ---------------------------------------------------------------------- PyTorch
def repeat_heads(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def hidden_pairs(case: Case, device: torch.device) -> Tensor | None:
    """Boolean (Sq, Sk), True where a bottom-right causal mask hides; None for full attention."""
    if not case.causal:
        return None
    return torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device).triu(1 + case.seqlen_k - case.seqlen_q)


def _build_unfused(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Built:
    """Matmul, softmax, matmul, each result written out in the input dtype."""
    hidden = hidden_pairs(case, query.device)
    scale = 1 / math.sqrt(case.head_dim)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = repeat_heads(key, case.group), repeat_heads(value, case.group)
        scores = (query * scale) @ key.transpose(-2, -1)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, dim=-1) @ value

    return Built(call)


def _build_sdpa(backend: SDPBackend, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Built:
    mask = None
    if case.causal and case.seqlen_q != case.seqlen_k:  # SDPA's is_causal is top-left there
        if backend not in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
            raise Refused("no bottom-right causal mask when Sq != Sk")
        hidden = hidden_pairs(case, query.device)
        mask = hidden.logical_not() if hidden is not None else None
    causal = case.causal and mask is None
    context = functools.partial(sdpa_kernel, backend)

    def grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=case.group > 1)

    def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = repeat_heads(key, case.group), repeat_heads(value, case.group)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)

    reason = _sdpa_refusal(grouped, context, query, key, value)
    if reason is None:
        return Built(grouped, context)
    if case.group == 1 or _sdpa_refusal(repeated, context, query, key, value) is not None:
        raise Refused(reason)
    return Built(repeated, context, note="key and value heads repeated inside the call (no GQA)")


def _sdpa_refusal(call: Call, context: Callable[[], AbstractContextManager], query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Run once. SDPA says that no kernel fits by RuntimeError, and why by warnings."""
    with warnings.catch_warnings(record=True) as caught, context():
        warnings.simplefilter("always")
        try:
            call(query, key, value)
            return None
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            messages = [first_line(warning.message) for warning in caught if isinstance(warning.message, Warning)]
            generic = ("kernel not used because", "has been runtime disabled")
            reasons = [message.split(" (Triggered internally")[0] for message in messages if not any(words in message for words in generic)]
            return "; ".join(reasons) or first_line(error)


def _build_flex(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Built:
    import torch._dynamo
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # else the recompilation limit turns later cases into eager, unfused ones
    torch._functorch.config.donated_buffer = False  # the timed backward retains its graph
    offset = case.seqlen_k - case.seqlen_q
    block_mask = None
    if case.causal:

        def visible(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx + offset >= kv_idx

        block_mask = create_block_mask(visible, None, None, case.seqlen_q, case.seqlen_k, device=str(query.device))
    call = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=block_mask, enable_gqa=case.group > 1)
    return Built(call, note="torch.compile; block mask made outside the timed region")


# ---------------------------------------------------------------------- the flash_attn packages
def _build_flash_attn(module: str, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Built:
    flash_attn_func = importlib.import_module(module).flash_attn_func

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = flash_attn_func(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=case.causal)
        out = out[0] if isinstance(out, tuple) else out  # the CuTe version returns (out, lse)
        return out.transpose(1, 2)

    return Built(call, note="called with (batch, seqlen, heads, head_dim) views")


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, "portable_flash", _build_ours, ("cuda", "cpu")),
        Peer("sdpa_flash", "SDPA flash", functools.partial(_build_sdpa, SDPBackend.FLASH_ATTENTION), ("cuda", "cpu")),
        Peer("sdpa_cudnn", "SDPA cuDNN", functools.partial(_build_sdpa, SDPBackend.CUDNN_ATTENTION)),
        Peer("sdpa_efficient", "SDPA efficient", functools.partial(_build_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
        Peer("sdpa_math", "SDPA math", functools.partial(_build_sdpa, SDPBackend.MATH), ("cuda", "cpu")),
        Peer("flex", "FlexAttention", _build_flex, module="triton"),
        Peer("flash_attn", "flash_attn (FA2)", functools.partial(_build_flash_attn, "flash_attn"), module="flash_attn"),
        Peer("flash_attn_cute", "flash_attn.cute (FA4)", functools.partial(_build_flash_attn, "flash_attn.cute"), module="flash_attn.cute"),
        Peer("unfused", "unfused", _build_unfused, ("cuda", "cpu"), default=False),
    )
}


def chosen(names: list[str] | None, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """Implementations to time, this library first, and why the other named ones are absent."""
    names = names or [name for name, peer in PEERS.items() if peer.default]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"--peers {unknown[0]!r}: allowed are {', '.join(PEERS)}")
    peers = [peer for name, peer in PEERS.items() if name in names or name == OURS]
    absent = {peer.name: reason for peer in peers if (reason := peer.absent(device)) is not None}
    return [peer for peer in peers if peer.name not in absent], absent
