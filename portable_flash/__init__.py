"""Exact attention, forward and backward, fast and with memory linear in the sequence length, on any GPU.

    import portable_flash
    out = portable_flash.attention(query, key, value, causal=True)   # (batch, heads, seqlen, head_dim)
    print(portable_flash.explain(query, key, value, causal=True))
"""

from .dispatch import NoBackendError
from .functional import attention, attention_varlen, explain
from .info import info
from .tiling import Tiling
from .tuning import tuning

__version__ = "0.1.0"
__all__ = ["NoBackendError", "Tiling", "attention", "attention_varlen", "explain", "info", "tuning"]
