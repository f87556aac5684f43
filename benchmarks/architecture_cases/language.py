"""Language models of transformers: decoders, encoders, encoder-decoders, mixtures of experts, state spaces."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.architecture_cases.case import EXAMPLES, Builder, Case, enlivened, mask, normal, tokens

T = 9
"""Tokens of the longest example."""
VOCABULARY = 31
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_SPECIAL,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
SUMMARY = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
SEQUENCE = SUMMARY | _SPECIAL | {
    "vocab_size": VOCABULARY, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip


def model_of(name: str, **options: Any) -> nn.Module:  # noqa: ANN401 - a configuration's own
    """The model class ``name`` of a configuration of the same family."""
    kind = getattr(transformers, name)
    config = kind.config_class(**options)
    for key in ("use_cache", "use_mem"):
        if hasattr(config, key):
            setattr(config, key, False)
    config._experts_implementation = "eager"  # noqa: SLF001 - the grouped product knows no float64
    config._attn_implementation = options.get("attn_implementation", "eager")  # noqa: SLF001 - how a config says it
    return enlivened(kind(config))


def causal(
    name: str,
    *,
    padded: bool = False,
    prompt: int = 0,
    loss: str | None = None,
    length: int = T,
    **options: Any,  # noqa: ANN401
) -> Builder:
    """A decoder that answers for the next token; ``prompt`` leading targets are ignored."""

    def build() -> Case:
        model = model_of(name, **options)
        ids = tokens(EXAMPLES, length, vocabulary=model.config.get_text_config().vocab_size)
        targets = ids.clone()
        for place in range(EXAMPLES if prompt else 0):
            targets[place, : prompt + place % 3] = -100
        inputs = {"input_ids": ids}
        if padded:
            inputs["attention_mask"] = mask(length)
            targets = torch.where(inputs["attention_mask"].bool(), targets, -100)
        return Case(model=model, inputs=inputs, targets=targets, task="causal_lm", loss=loss)

    return build


def masked(name: str, *, padded: bool = True, length: int = T, loss: str | None = None, **options: Any) -> Builder:  # noqa: ANN401
    """An encoder that answers for the tokens at some positions only."""

    def build() -> Case:
        model = model_of(name, **options)
        ids = tokens(EXAMPLES, length, vocabulary=model.config.vocab_size)
        targets = torch.where(torch.rand(EXAMPLES, length) < 0.4, ids, -100)
        targets[:, 1] = ids[:, 1]
        inputs = {"input_ids": ids}
        if padded:
            inputs["attention_mask"] = mask(length)
            targets = torch.where(inputs["attention_mask"].bool(), targets, -100)
        return Case(model=model, inputs=inputs, targets=targets, task="masked_lm", loss=loss)

    return build


def classifier(name: str, *, padded: bool = True, length: int = T, **options: Any) -> Builder:  # noqa: ANN401
    """An encoder or decoder that classifies whole sequences."""

    def build() -> Case:
        model = model_of(name, num_labels=3, **options)
        inputs = {"input_ids": tokens(EXAMPLES, length)}
        if padded:
            inputs["attention_mask"] = mask(length)
        return Case(
            model=model, inputs=inputs, targets=torch.randint(0, 3, (EXAMPLES,)), task="sequence_classification"
        )

    return build


def translation(name: str, *, answer: int = T, **options: Any) -> Builder:  # noqa: ANN401
    """An encoder-decoder; ``answer`` positions in the decoder, as many as in the encoder or not."""

    def build() -> Case:
        model = model_of(name, **options)
        ids = tokens(EXAMPLES, answer)
        targets = torch.where(mask(answer, (6, 5, 4, 4, 3, 4)).bool(), ids, -100)
        inputs = {
            "input_ids": tokens(EXAMPLES, T),
            "attention_mask": mask(T),
            "decoder_input_ids": ids.roll(1, 1),
        }
        return Case(model=model, inputs=inputs, targets=targets, task="masked_lm", padded=_encoding)

    return build


def _encoding(name: str) -> bool:
    """Whether a module works on the encoder's positions: the encoder, and what attends to it takes of it."""
    across = "encoder_attn" in name or "EncDecAttention" in name or "cross_attn" in name or "cross_attention" in name
    if across:
        return name.endswith(("k_proj", "v_proj", ".k", ".v"))
    return "encoder" in name.replace("encoder_decoder", "").split(".")


class MeanPooled(nn.Module):
    """The mean over all positions, padding too, and a linear head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (N, 3)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def mean_pooled() -> Case:
    """BERT whose mean takes padding in: gradients do reach masked positions."""
    encoder = transformers.BertModel(
        transformers.BertConfig(**SMALL, attn_implementation="eager"), add_pooling_layer=False
    )
    inputs = {"input_ids": tokens(EXAMPLES, T), "attention_mask": mask(T)}
    return Case(
        model=enlivened(MeanPooled(encoder)),
        inputs=inputs,
        targets=torch.randint(0, 3, (EXAMPLES,)),
        task="classification",
    )


def labelled_padding() -> Case:
    """BERT with labels on some of its padding, which are loss terms like others."""
    case = masked("BertForMaskedLM", **SMALL)()
    targets = case.targets.clone()
    targets[:, -1] = tokens(EXAMPLES)
    return Case(model=case.model, inputs=case.inputs, targets=targets, task="masked_lm")


def embedded_inputs() -> Case:
    """GPT-2 fed vectors in place of ids."""
    model = model_of("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return Case(
        model=model, inputs={"inputs_embeds": normal(EXAMPLES, T, 16)}, targets=tokens(EXAMPLES, T), task="causal_lm"
    )


_MOE = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4} | _SPECIAL
_DEEPSEEK = GROUPED | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "moe_intermediate_size": 12,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "head_dim": 4,
}  # fmt: skip

CASES: dict[str, Builder] = {
    "GPT-2": causal("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "GPT-2, padded": causal("GPT2LMHeadModel", padded=True, vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32),
    "GPT-2, vectors as inputs": embedded_inputs,
    "Llama": causal("LlamaForCausalLM", **GROUPED),
    "Llama SFT, prompts ignored": causal("LlamaForCausalLM", prompt=4, **GROUPED),
    "Llama SFT, padded, own loss": causal("LlamaForCausalLM", prompt=1, padded=True, loss="model", **GROUPED),
    "Mistral": causal("MistralForCausalLM", padded=True, **GROUPED),
    "Gemma": causal("GemmaForCausalLM", head_dim=4, **GROUPED),
    "Gemma 2": causal("Gemma2ForCausalLM", padded=True, head_dim=4, **GROUPED),
    "Gemma 3": causal("Gemma3ForCausalLM", head_dim=4, **GROUPED),
    "Qwen2": causal("Qwen2ForCausalLM", tie_word_embeddings=True, **GROUPED),
    "Qwen3": causal("Qwen3ForCausalLM", head_dim=4, **GROUPED),
    "Qwen2-MoE": causal("Qwen2MoeForCausalLM", shared_expert_intermediate_size=12, **_MOE),
    "Qwen3-MoE": causal("Qwen3MoeForCausalLM", head_dim=4, padded=True, **_MOE),
    "Mixtral": causal("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "JetMoE": causal("JetMoeForCausalLM", kv_channels=4, num_local_experts=4, num_experts_per_tok=2, padded=True, **GROUPED),
    "OLMoE": causal("OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **GROUPED),
    "Granite-MoE": causal("GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "PhiMoE": causal("PhimoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "GPT-OSS": causal("GptOssForCausalLM", head_dim=4, num_local_experts=4, num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"], **GROUPED),
    "Llama 4": causal("Llama4ForCausalLM", head_dim=4, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=24, **GROUPED),
    "DeepSeek-V2": causal("DeepseekV2ForCausalLM", **_DEEPSEEK),
    "DeepSeek-V3": causal("DeepseekV3ForCausalLM", **_DEEPSEEK),
    "OLMo 2": causal("Olmo2ForCausalLM", **GROUPED),
    "Phi": causal("PhiForCausalLM", **GROUPED),
    "Phi-3": causal("Phi3ForCausalLM", **GROUPED),
    "OPT": causal("OPTForCausalLM", padded=True, vocab_size=VOCABULARY, hidden_size=16, word_embed_proj_dim=8, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32, **_SPECIAL),
    "BLOOM": causal("BloomForCausalLM", padded=True, vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4, **_SPECIAL),
    "Falcon": causal("FalconForCausalLM", alibi=False, new_decoder_architecture=True, num_kv_heads=2, **SMALL),
    "GPT-NeoX": causal("GPTNeoXForCausalLM", **SMALL),
    "GPT-J": causal("GPTJForCausalLM", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32, **_SPECIAL),
    "Mamba": causal("MambaForCausalLM", **_MAMBA),
    "Mamba-2": causal("Mamba2ForCausalLM", num_heads=4, head_dim=8, n_groups=2, chunk_size=4, expand=2, **_MAMBA),
    "Jamba": causal("JambaForCausalLM", use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=2, **GROUPED),
    "LFM2": causal("Lfm2ForCausalLM", layer_types=["conv", "full_attention"], block_ff_dim=24, block_auto_adjust_ff_dim=False, **GROUPED),
    "RWKV": causal("RwkvForCausalLM", vocab_size=VOCABULARY, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, context_length=16, **_SPECIAL),
    "BERT masked LM": masked("BertForMaskedLM", padded=False, **SMALL),
    "BERT masked LM, padded": masked("BertForMaskedLM", **SMALL),
    "BERT, labels on padding": labelled_padding,
    "BERT, mean over padding too": mean_pooled,
    "RoBERTa": masked("RobertaForMaskedLM", **SMALL),
    "ALBERT": masked("AlbertForMaskedLM", embedding_size=8, **SMALL),
    "ELECTRA": classifier("ElectraForSequenceClassification", embedding_size=8, **SMALL),
    "DeBERTa": classifier("DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"], **SMALL),
    "DeBERTa-v2": masked("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", **SMALL),
    "MobileBERT": masked("MobileBertForMaskedLM", embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8, num_feedforward_networks=2, **SMALL),
    "XLNet": classifier("XLNetForSequenceClassification", vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, **_SPECIAL),
    "Nystromformer": classifier("NystromformerForSequenceClassification", num_landmarks=4, segment_means_seq_len=8, padded=False, length=8, conv_kernel_size=3, **SMALL),
    "RoFormer": masked("RoFormerForMaskedLM", **SMALL),
    "Funnel": classifier("FunnelForSequenceClassification", vocab_size=VOCABULARY, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24, **_SPECIAL),
    "Longformer": masked("LongformerForMaskedLM", attention_window=4, length=8, padded=False, **SMALL),
    "BigBird": masked("BigBirdForMaskedLM", attention_type="original_full", **SMALL),
    "FNet": classifier("FNetForSequenceClassification", padded=False, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, intermediate_size=24, max_position_embeddings=32, **_SPECIAL),
    "ModernBERT": masked("ModernBertForMaskedLM", **SMALL),
    "T5": translation("T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0),
    "T5, shorter answers": translation("T5ForConditionalGeneration", answer=6, vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "BART": translation("BartForConditionalGeneration", **SEQUENCE),
    "mBART": translation("MBartForConditionalGeneration", scale_embedding=True, **SEQUENCE),
    "Pegasus": translation("PegasusForConditionalGeneration", answer=7, **SEQUENCE),
}  # fmt: skip
