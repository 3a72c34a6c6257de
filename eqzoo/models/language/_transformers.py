"""What the config.json files of transformers' language models have in common."""

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
