"""What the config.json of every language model may say."""

# Of training, generation, labels, tokens and the library: no number of a model depends on it.
HARMLESS = (
    "_.*|transformers_version|model_type|torch_dtype|dtype|torchscript|use_bfloat16|tokenizer_class|prefix",
    "(attn|experts)_implementation|return_dict|output_(attentions|hidden_states|past|scores)|return_dict_in_generate",
    "use_cache|gradient_checkpointing|chunk_size_feed_forward|initializer_(range|factor)|finetuning_task|problem_type",
    "(bos|eos|pad|sep|cls|mask|unk|decoder_start|forced_bos|forced_eos)_token_id|id2label|label2id|task_specific_params",
    "(max|min)_length|do_sample|early_stopping|(num|num_return)_(beams|beam_groups|sequences)|temperature|top_[kp]",
    "typical_p|(repetition|length|diversity)_penalty|(encoder_)?no_repeat_ngram_size|bad_words_ids|n_positions",
    "remove_invalid_values|exponential_decay_length_penalty|(begin_)?suppress_tokens|num_return_sequences",
)
