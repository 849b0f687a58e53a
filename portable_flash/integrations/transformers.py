"""portable_flash as an attention implementation of Hugging Face transformers (5.17 or newer).

    from portable_flash.integrations.transformers import register

    model = AutoModel.from_pretrained(..., attn_implementation=register())

transformers describes what a query may see in one of three ways, and this module keeps its meaning in each:

- A boolean mask (True = may attend) or an additive floating-point mask holds everything: causality, window, padding.
- No mask, one query or a module that is not causal: every key is visible.
- No mask, several queries and a causal module: query i sees the keys 0..i. With more keys than queries these are the
  unwritten slots at the end of a static cache, so the diagonal starts at key 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ..functional import attention

# Models whose attention modules hand their sliding window to the attention function, layer by layer. Only for these may
# a sliding-window mask be left out: the others keep the window in the mask alone, and would silently see every key.
WINDOW_IN_CALL = frozenset(
    {"cohere2", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral", "mixtral", "olmo3", "qwen2", "qwen3"}
)

# Parts of a name that transformers reads as a request for another implementation.
RESERVED = {
    "flash": "sends every name that contains 'flash' to the loader of flash-attn, which fails",
    "sdpa": "refuses a name that contains 'sdpa' for models without SDPA support",
    "flex_attention": "refuses a name that contains 'flex_attention' for models without FlexAttention support",
    "paged|": "cuts this prefix off the name",
    "/": "takes a name with a slash for a kernel to be downloaded",
}


def register(name: str = "portable_attention") -> str:
    """Make ``name`` an attention implementation of transformers and return it; calling it again changes nothing.

    ValueError if transformers would read the name as something else, or if the name belongs to another implementation.
    """
    for part, reason in RESERVED.items():
        if part in name:
            raise ValueError(f"name={name!r}: transformers {reason}; choose another name, for example 'portable_attention'")
    interfaces = (AttentionInterface(), attention_forward), (AttentionMaskInterface(), attention_mask)
    for interface, function in interfaces:
        if name == "eager" or interface.get(name, function) is not function:
            raise ValueError(f"name={name!r}: already the name of another attention implementation of transformers")
    for interface, function in interfaces:
        interface.register(name, function)
    return name


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); attention_mask and position_bias broadcast to
    (B, Hq, Sq, Sk); s_aux (Hq,), the sinks. sliding_window counts the query itself. Returns the output (B, Sq, Hq, Dv)
    and None, since the weights never exist. A row whose mask hides every key is 0.

    ValueError if the weights are asked for; NotImplementedError for dropout; everything else that ``attention`` refuses.
    """
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: the weights are never stored here; load the model with attn_implementation='eager'")

    mask = bias = None
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias

    seqlen_q = query.shape[2]
    window = None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None and seqlen_q > 1
    if causal:
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]  # the rest are unwritten slots of a static cache
        bias = None if bias is None else bias[..., :seqlen_q]
        window = None if sliding_window is None else (sliding_window - 1, 0)
    if query.shape[0] == 1:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries, shared by the batch

    # transformers views (B, S, H, D) memory as (B, H, S, D): seen the other way round, neither inputs nor output are copied
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        window=window,
        scale=scaling,
        softcap=softcap,
        bias=bias,
        sinks=s_aux,
        mask=mask,
        dropout_p=dropout,
        layout="bshd",
    )
    return out, None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask that ``attention_forward`` needs: boolean (batch_size, 1, q_length, kv_length), or None where it needs none.

    As for SDPA, but of linear size in two more cases: padding alone is an expanded view of the (batch_size, kv_length)
    ``attention_mask``, and a sliding window over unpadded tokens without a cache needs no mask (see WINDOW_IN_CALL).
    """
    unpadded = attention_mask is None
    if attention_mask is not None and not torch.compiler.is_compiling():  # a compiled graph cannot branch on values
        unpadded = bool(attention_mask.all())

    prefill = q_length == kv_length and kv_offset == 0 and isinstance(q_offset, int) and q_offset == 0
    if prefill and unpadded and allow_is_causal_skip and local_size is not None and sliding_window_in_call(config):
        return None
    if mask_function is bidirectional_mask_function and not unpadded and kv_offset == 0 and attention_mask.shape[-1] == kv_length:
        return attention_mask[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


def sliding_window_in_call(config: Any) -> bool:
    """Whether ``attention_forward`` will be told the window: not for unknown models, nor for chunks (Llama 4), which are no window."""
    return getattr(config, "model_type", None) in WINDOW_IN_CALL and getattr(config, "attention_chunk_size", None) is None
