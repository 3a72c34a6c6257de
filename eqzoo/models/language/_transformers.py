"""What the config.json files of transformers' language models have in common."""

from collections.abc import Mapping
from typing import Any

# Facts about the file, the tokenizer, generation, training and other heads: they change no logit.
NOT_MATHEMATICS = (
    r"_name_or_path|name_or_path|transformers_version|architectures|auto_map|model_type|torch_dtype|dtype|unsloth_.*",
    r"return_dict|output_.*|use_cache|cache_implementation|torchscript|use_bfloat16|tf_legacy_loss|_attn_.*|attn_impl.*",
    r"(bos|eos|pad|sep|decoder_start)_token_id|prefix|id2label|label2id|num_labels|problem_type|finetuning_task",
    r"task_specific_params|tokenizer_class|pruned_heads|initializer_range|gradient_checkpointing|classifier_dropout",
    r"max_length|min_length|do_sample|early_stopping|(num|diversity)_.*beam.*|temperature|top_[kp]|typical_p",
    r".*repetition_penalty|length_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size|bad_words_ids",
    r"num_return_sequences|remove_invalid_values|exponential_decay_length_penalty|forced_.*_token_id|suppress_tokens",
    r"begin_suppress_tokens|is_decoder|is_encoder_decoder|chunk_size_feed_forward|pretraining_tp",
)


def read_rotary(parameters: Mapping[str, Any], base: float) -> tuple[float, float]:
    """The base and the linear factor that transformers' `rope_parameters` or `rope_scaling` state."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ValueError(f"rope_type={kind!r} is not supported here; eqzoo has 'default' and 'linear'")
    known = {"rope_type", "type", "rope_theta", "factor"}
    if unknown := parameters.keys() - known:
        raise ValueError(f"rotary option {min(unknown)!r} is not known to eqzoo")
    return parameters.get("rope_theta", base), parameters["factor"] if kind == "linear" else 1.0


def write_rotary(base: float, factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    return {"rope_theta": base, **scaling}
