"""The public calls: arguments checked, and handed to the operators."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import ops
from .backends import NAMES, Plan, load
from .problem import DTYPE_NAMES, MAX_ROW_STRIDE
from .tuning import override

if TYPE_CHECKING:
    from .explanation import Explanation

LAYOUTS = ("bhsd", "bshd")
CAUSAL = (False, True, "bottom_right", "top_left")
MAX_HEAD_DIM = 256


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * Q K^T) V, in memory linear in the sequence length, with gradients.

    Args:
        query: (B, Hq, Sq, D), or (B, Sq, Hq, D) with ``layout="bshd"``; float16, bfloat16 or float32 (on the CPU also
            float64). Strides are free; a last dimension that is not contiguous, or rows 2**23 elements apart, are copied.
        key: (B, Hk, Sk, D). Hq is a multiple of Hk: query head h reads key head h // (Hq / Hk).
        value: (B, Hk, Sk, Dv). D and Dv are 1 to 256.
        causal: True or "bottom_right": query i sees keys j <= i + Sk - Sq, so that new queries attend to a longer cache;
            "top_left": j <= i.
        window: (left, right): keys from i + Sk - Sq - left to i + Sk - Sq + right (top_left: without Sk - Sq), the query
            itself not counted; None is unbounded.
        scale: of the logits, any finite number; D ** -0.5 when None.
        softcap: logits become softcap * tanh(logits / softcap); None or 0 is off.
        bias: added to the capped logits; floating point, may be wider than the inputs, broadcasts to (B, Hq, Sq, Sk). Has
            a gradient. -inf hides a key; no finite value does.
        alibi_slopes: (Hq,) or (B, Hq): subtracts slope * abs(i + Sk - Sq - j). No gradient.
        sinks: (Hq,): one more logit in each softmax's denominator, neither scaled nor capped. Has a gradient.
        mask: boolean, True = may attend, broadcasts to (B, Hq, Sq, Sk). Combines with causal and window: all must agree.
        dropout_p: must be 0.0 for now.
        return_lse: also return the log-sum-exp of each row's logits (natural log), (B, Hq, Sq) float32, differentiable.
        layout: "bhsd" or "bshd", of query, key, value and output.
        deterministic: bitwise repeatable gradients (the forward pass always is).
        backend: "triton", "hip" or "cpu" to force one; None takes the best that can run.
        validate: also check what takes a synchronisation with the device (packed calls only).

    Returns:
        Output shaped like query with value's head_dim, contiguous, in the input's dtype; with ``return_lse`` (output, lse).
        A row that sees no key gives 0, lse -inf (with a sink: the sink), and gradients 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or two that disagree; the message names both.
        NotImplementedError: dropout, block masks, double backward, or no backend can do the call (each one's reason).

    Source: FlashAttention, Dao et al. 2022 (arXiv:2205.14135), sections 3.1 and B.
    """
    signature = None
    if bias is None and alibi_slopes is None and sinks is None and mask is None and not dropout_p and not torch.compiler.is_compiling():
        try:
            signature = (
                query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
                query.stride(), key.stride(), value.stride(), causal, window, scale, softcap, layout, deterministic, backend,
            )  # fmt: skip
            checked = _CHECKED.get(signature)
        except (AttributeError, TypeError):  # no tensors, or a list as window: the checks below say what is wrong
            signature = checked = None
        if checked is not None and _plain(query, key, value) and not override():
            options, plan = checked
            result = _run_eager((query, key, value, *options), plan)
            return result if return_lse else result[0]

    arguments = _prepare(
        query, key, value, causal, window, scale, softcap, bias, alibi_slopes, sinks, mask, dropout_p, layout, deterministic, backend
    )
    result = _run(arguments)
    if signature is not None and _plain(query, key, value) and not override():
        unchanged = all(a is b for a, b in zip(arguments, (query, key, value)))
        if unchanged and not (query.is_cuda and torch.cuda.is_current_stream_capturing()):  # a plan made there is unproven
            if len(_CHECKED) >= _MAX_CHECKED:
                _CHECKED.clear()
            _CHECKED[signature] = (arguments[3:], ops.plan_of(arguments))
    return result if return_lse else result[0]


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
    deterministic: bool = False,
    backend: str | None = None,
    validate: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of B sequences packed one after another; see ``attention`` for what the options mean.

    Args:
        query: (total_q, Hq, D).
        key: (total_k, Hk, D).
        value: (total_k, Hk, Dv).
        cu_seqlens_q: (B + 1,) int32 or int64 on the same device: sequence b is rows cu_seqlens_q[b]:cu_seqlens_q[b + 1].
        cu_seqlens_k: the same for key and value.
        max_seqlen_q: upper bound of the query lengths, used to size the launch, never read as a length.
        max_seqlen_k: upper bound of the key lengths.
        bias, mask: broadcast to (B, Hq, max_seqlen_q, max_seqlen_k), positions counted from each sequence's start.
        layout: has no effect on packed tensors.
        validate: check the values inside cu_seqlens. On the CPU they always are; on a GPU reading them waits for the
            device, so that without ``validate`` they are only forced into the tensors' bounds.

    Returns:
        Output (total_q, Hq, Dv); with ``return_lse`` also lse (Hq, total_q). Rows outside all sequences: 0 and -inf.

    Raises:
        As ``attention``; ValueError when cu_seqlens do not fit the tensors or each other.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor, 3, "(total, heads, head_dim)")
    batch = _check_cu_seqlens(query, key, cu_seqlens_q, cu_seqlens_k)
    for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(bound, (int, torch.SymInt)) or isinstance(bound, bool) or bound < 0:
            raise ValueError(f"{name}={bound!r}: must be an integer >= 0")
    if validate or (query.device.type == "cpu" and not torch.compiler.is_compiling() and _readable(cu_seqlens_q, cu_seqlens_k)):
        _check_lengths("q", cu_seqlens_q, query.shape[0], max_seqlen_q if validate else None)
        _check_lengths("k", cu_seqlens_k, key.shape[0], max_seqlen_k if validate else None)
    prepared = _prepare(
        query, key, value, causal, window, scale, softcap, bias, alibi_slopes, sinks, mask, dropout_p, layout, deterministic, backend,
        packed=(batch, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    result = _run(prepared)
    return result if return_lse else result[0]


def explain(
    query: Tensor, key: Tensor, value: Tensor, *varlen: Any, device: str | None = None, needs_grad: bool | None = None, **options: Any
) -> Explanation:
    """The plan of ``attention(query, key, value, **options)``, or of ``attention_varlen`` with its four more arguments.

    Args:
        device: a GPU model of the catalogue ("mi300x"): the plan that it would get, without that GPU (nothing is run).
        needs_grad: plan the backward pass; None asks the tensors.

    Returns:
        An Explanation: backend, kernels, tilings with their sources, FLOPs and HBM bytes predicted, refusals. Print it.
    """
    from .explanation import explain_arguments

    for name in ("return_lse", "validate"):
        options.pop(name, None)
    defaults = dict(causal=False, window=None, scale=None, softcap=None, bias=None, alibi_slopes=None, sinks=None, mask=None, dropout_p=0.0)
    defaults |= dict(layout="bhsd", deterministic=False, backend=None)
    unknown = set(options) - set(defaults)
    if unknown:
        raise TypeError(f"explain() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    packed = None
    if varlen:
        packed = (_check_cu_seqlens(query, key, *varlen[:2]), *varlen)
    prepared = _prepare(query, key, value, *(defaults | options).values(), packed=packed)
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in prepared[:6])
    return explain_arguments(prepared, device, needs_grad)


# ---------------------------------------------------------------- running
_CHECKED: dict[tuple, tuple] = {}  # signature of a call without optional tensors -> its options and plan, once checked
_MAX_CHECKED = 8192


def _plain(*tensors: Tensor) -> bool:
    """Whether nothing watches or transforms torch operators here, so that calling past the dispatcher changes nothing."""
    return (
        _readable(*tensors)
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._autograd._profiler_enabled()
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )


def _readable(*tensors: Tensor) -> bool:
    """Whether these tensors hold numbers that the host may read: none is fake, traced or transformed."""
    for t in tensors:
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def _run(arguments: tuple) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_compiling() and _plain(*[t for t in arguments[: ops.NUM_TENSORS] if t is not None]):
        return _run_eager(arguments, ops.plan_of(arguments))
    return ops.forward_op(*arguments)


def _run_eager(arguments: tuple, plan: Plan) -> tuple[Tensor, Tensor]:
    """The operator's own kernel or autograd formula, called directly: most of a small call's time is the dispatcher's."""
    if torch.is_grad_enabled():
        for t in arguments[: ops.NUM_TENSORS]:
            if t is not None and t.requires_grad:
                return ops.EagerAttention.apply(*arguments, plan)
    return ops.run_forward(plan, arguments)


# ---------------------------------------------------------------- checks
def _prepare(
    query, key, value, causal, window, scale, softcap, bias, alibi_slopes, sinks, mask, dropout_p, layout, deterministic, backend,
    packed=None,
) -> tuple:  # fmt: skip
    """Check everything about a call that the host can know; return the forward operator's arguments."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: allowed are {' and '.join(map(repr, LAYOUTS))}")
    if packed is None:
        shape = "(batch, heads, seqlen, head_dim)" if layout == "bhsd" else "(batch, seqlen, heads, head_dim)"
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, tensor, 4, shape)
    _check_agreement(query, key, value)
    query, key, value = _autocast(query, key, value)
    batch, heads_q, seqlen_q, seqlen_k = _check_shapes(query, key, value, layout, packed)
    if backend is not None and backend not in NAMES:
        load(backend)  # raises; a backend that exists is not imported here, where torch.compile traces
    _check_dropout(dropout_p)
    left, right, top_left = _check_window(causal, window)
    scale = None if scale is None else _check_number("scale", scale)
    softcap = 0.0 if softcap is None else _check_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap={softcap}: must be positive; None or 0 turns it off")
    full = (batch, heads_q, seqlen_q, seqlen_k)
    bias = _check_bias(bias, full, query)
    mask = _check_mask(mask, full, query)
    alibi_slopes = _check_slopes(alibi_slopes, batch, heads_q, query)
    sinks = _check_sinks(sinks, heads_q, query)
    _, cu_q, cu_k, max_q, max_k = packed or (batch, None, None, seqlen_q, seqlen_k)
    query, key, value = (_addressable(t, layout) for t in (query, key, value))
    return (
        query, key, value, bias, alibi_slopes, sinks, mask, cu_q, cu_k, max_q, max_k, left, right, top_left,
        scale, softcap, layout, bool(deterministic), backend or "",
    )  # fmt: skip


def _addressable(tensor: Tensor, layout: str) -> Tensor:
    """The tensor, or a copy where kernels could not address a tile: they step along rows with 32-bit offsets."""
    rows = tensor.stride(0 if tensor.dim() == 3 else 2 if layout == "bhsd" else 1)
    return tensor if (tensor.stride(-1) == 1 or tensor.shape[-1] == 1) and rows < MAX_ROW_STRIDE else tensor.contiguous()


def _check_tensor(name: str, tensor: Any, dims: int, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}: must be a torch.Tensor of shape {shape}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must have {dims} dimensions, {shape}")


def _check_agreement(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"query is {query.dtype} and {name} is {tensor.dtype}: query, key and value must have one dtype")
        if tensor.device != query.device:
            raise ValueError(f"query is on {query.device} and {name} is on {tensor.device}: all tensors must be on one device")
    if query.dtype not in DTYPE_NAMES:
        raise TypeError(f"query, key and value are {query.dtype}: allowed are {', '.join(map(str, DTYPE_NAMES))}")


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast attention runs in its dtype, like torch's own; float64 is left alone, as torch leaves it."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) for t in tensors)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, layout: str, packed: tuple | None) -> tuple[int, int, int, int]:
    heads, rows = (1, 0) if packed is not None else ((1, 2) if layout == "bhsd" else (2, 1))
    both = lambda a, x, b, y: f"{a} has shape {tuple(x.shape)} and {b} has shape {tuple(y.shape)}"
    if packed is None and (query.shape[0] != key.shape[0] or key.shape[0] != value.shape[0]):
        other = ("key", key) if query.shape[0] != key.shape[0] else ("value", value)
        raise ValueError(f"{both('query', query, *other)}: they must have one batch size")
    if key.shape[rows] != value.shape[rows]:
        raise ValueError(f"{both('key', key, 'value', value)}: key and value must have one sequence length")
    if key.shape[heads] != value.shape[heads]:
        raise ValueError(f"{both('key', key, 'value', value)}: key and value must have the same number of heads")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"{both('query', query, 'key', key)}: query and key must have one head_dim")
    heads_q, heads_k = query.shape[heads], key.shape[heads]
    if heads_q != heads_k and (heads_k == 0 or heads_q % heads_k != 0):
        raise ValueError(f"query has {heads_q} heads and key has {heads_k}: the first must be a multiple of the second")
    for name, tensor in (("query", query), ("value", value)):
        if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {tensor.shape[-1]}: allowed are 1 to {MAX_HEAD_DIM}")
    if packed is not None:
        return packed[0], heads_q, packed[3], packed[4]
    return query.shape[0], heads_q, query.shape[rows], key.shape[rows]


def _check_dropout(dropout_p: float) -> None:
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p={dropout_p!r}: must be a probability")
    if dropout_p:
        raise NotImplementedError(f"dropout_p={dropout_p}: dropout is not implemented; pass 0.0 (in evaluation too)")


def _check_window(causal: bool | str, window: Any) -> tuple[int, int, bool]:
    """Left and right reach (-1: unbounded) and whether the diagonal starts at the top left: causal is a right reach of 0."""
    if not isinstance(causal, (bool, str)) or causal not in CAUSAL:
        raise ValueError(f"causal={causal!r}: allowed are {', '.join(map(repr, CAUSAL))}")
    reaches = (None, None) if window is None else window
    try:
        left, right = reaches
    except (TypeError, ValueError):
        raise ValueError(f"window={window!r}: must be (left, right), each an integer >= 0 or None") from None
    for reach in (left, right):
        if reach is not None and (isinstance(reach, bool) or not isinstance(reach, (int, torch.SymInt)) or reach < 0):
            raise ValueError(f"window={window!r}: each reach must be an integer >= 0, or None for unbounded")
    if causal:
        right = 0
    return (-1 if left is None else left), (-1 if right is None else right), causal == "top_left"


def _check_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}={value!r}: must be a number")
    if not -math.inf < value < math.inf:  # math.isfinite would break torch.compile's graph where sizes are symbols
        raise ValueError(f"{name}={value!r}: must be finite")
    return float(value)


def _broadcast(name: str, tensor: Tensor, full: tuple[int, int, int, int]) -> Tensor:
    """As 4-D, each size 1 or the full one."""
    names = "(batch, query heads, query length, key length)"
    if tensor.dim() > 4 or any(n != 1 and n != m for n, m in zip(reversed(tensor.shape), reversed(full))):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must broadcast to {names} = {tuple(full)}")
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape)) if tensor.dim() < 4 else tensor


def _same_device(name: str, tensor: Any, query: Tensor, kind: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}: must be {kind}")
    if tensor.device != query.device:
        raise ValueError(f"query is on {query.device} and {name} is on {tensor.device}: all tensors must be on one device")


def _check_bias(bias: Tensor | None, full: tuple, query: Tensor) -> Tensor | None:
    if bias is None:
        return None
    _same_device("bias", bias, query, "a floating point tensor")
    if bias.dtype not in DTYPE_NAMES:
        hint = "; a boolean mask goes to mask=" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias is {bias.dtype}: allowed are {', '.join(map(str, DTYPE_NAMES))}{hint}")
    if bias.dtype == torch.float64 and query.dtype != torch.float64:
        raise TypeError(f"bias is {bias.dtype} and query is {query.dtype}: a float64 bias needs float64 inputs")
    return _broadcast("bias", bias, full)


def _check_mask(mask: Any, full: tuple, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        if type(mask).__name__ == "BlockMask":
            raise NotImplementedError("mask is a BlockMask: block masks are not implemented; pass a boolean tensor")
        raise TypeError(f"mask is {type(mask).__name__}: must be a boolean tensor")
    _same_device("mask", mask, query, "a boolean tensor")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: must be torch.bool, True = may attend; an additive mask goes to bias=")
    return _broadcast("mask", mask, full)


def _check_slopes(slopes: Tensor | None, batch: int, heads: int, query: Tensor) -> Tensor | None:
    if slopes is None:
        return None
    _same_device("alibi_slopes", slopes, query, "a floating point tensor")
    if not slopes.is_floating_point():
        raise TypeError(f"alibi_slopes is {slopes.dtype}: must be floating point")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        allowed = f"(query heads,) = ({heads},) and (batch, query heads) = ({batch}, {heads})"
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}: allowed are {allowed}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("alibi_slopes requires a gradient, which is not implemented: pass alibi_slopes.detach(), or bias=")
    return slopes.to(_wide(query)).expand(batch, heads)


def _check_sinks(sinks: Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    _same_device("sinks", sinks, query, "a floating point tensor")
    if not sinks.is_floating_point():
        raise TypeError(f"sinks is {sinks.dtype}: must be floating point")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: must be (query heads,) = ({heads},)")
    return sinks.to(_wide(query)).contiguous()


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _check_cu_seqlens(query: Tensor, key: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> int:
    """Their kind and shape; returns the number of sequences."""
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _same_device(name, cu, query, "an int32 or int64 tensor of shape (sequences + 1,)")
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {cu.dtype}: allowed are torch.int32 and torch.int64")
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(cu.shape)}: must be (sequences + 1,)")
        if not cu.is_contiguous():
            raise ValueError(f"{name} has stride {cu.stride(0)}: must be contiguous")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q has shape {tuple(cu_seqlens_q.shape)} and cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}: "
            "they must describe the same sequences"
        )
    return cu_seqlens_q.shape[0] - 1


def _check_lengths(which: str, cu_seqlens: Tensor, total: int, bound: int | None) -> None:
    values = cu_seqlens.tolist()
    name, tensor = f"cu_seqlens_{which}", "query" if which == "q" else "key"
    if values[0] < 0 or values[-1] > total:
        raise ValueError(f"{name} runs from {values[0]} to {values[-1]} and {tensor} has {total} rows: it must stay within 0 to {total}")
    lengths = [b - a for a, b in zip(values, values[1:])]
    if lengths and min(lengths) < 0:
        at = lengths.index(min(lengths))
        raise ValueError(f"{name} falls from {values[at]} to {values[at + 1]} at sequence {at}: it must not decrease")
    if bound is not None and lengths and max(lengths) > bound:
        raise ValueError(f"{name} has a sequence of {max(lengths)} rows and max_seqlen_{which} is {bound}: it must be at least as long")
