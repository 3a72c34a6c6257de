"""How transformers writes ModernBERT down."""

from typing import Any

from eqzoo.checkpoint import SPLIT, Alias, Rule, prefixed, staged
from eqzoo.models._family import Option, Options
from eqzoo.models.language._bert_upstream import CLASSIFIERS, written_labels
from eqzoo.models.language._transformers import NOT_MATHEMATICS

_BLOCK = (
    Rule(r"attn_norm\.(weight|bias)", "norm1.{0}"),
    Rule(r"attn\.Wqkv\.(weight|bias)", ("attention.query.{0}", "attention.key.{0}", "attention.value.{0}"), SPLIT),
    Rule(r"attn\.Wo\.(weight|bias)", "attention.out.{0}"),
    Rule(r"mlp_norm\.(weight|bias)", "norm2.{0}"),
    Rule(r"mlp\.Wi\.(weight|bias)", ("mlp.gate.{0}", "mlp.up.{0}"), SPLIT),
    Rule(r"mlp\.Wo\.(weight|bias)", "mlp.down.{0}"),
)
TRANSFORMERS_BODY = (
    Rule(r"embeddings\.tok_embeddings\.weight", "embedding.weight"),
    Rule(r"embeddings\.norm\.(weight|bias)", "embedding_norm.{0}"),
    *staged(r"layers\.", "", _BLOCK),
    Rule(r"final_norm\.(weight|bias)", "norm.{0}"),
)
TRANSFORMERS = (
    *prefixed(r"model\.", "", TRANSFORMERS_BODY),
    Rule(r"head\.(dense|norm)\.(weight|bias)", "pre_head.{0}.{1}"),
    Rule(r"classifier\.(weight|bias)", "head.{0}"),
    Rule(r"decoder\.bias", "vocab_bias"),
    Alias(r"decoder\.weight", "model.embeddings.tok_embeddings.weight"),
)

_PADDING = 50283  # what transformers assumes, for its table has a row of zeros there
_HEADS = {
    "ModernBertForMaskedLM": "masked_lm",
    "ModernBertForSequenceClassification": "classifier",
    "ModernBertForTokenClassification": "token_classifier",
    "ModernBertForQuestionAnswering": "question_answering",
    "ModernBertModel": None,
}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_ACTIVATIONS |= {"silu": "silu", "swish": "silu"}


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 lists the kind of each layer, and states the positions of each kind."""
    options = {"classifier_pooling": "cls", **options}
    rope = options.pop("rope_parameters", None) or {}
    for kind, name in (("full_attention", "global_rope_theta"), ("sliding_attention", "local_rope_theta")):
        stated = rope.get(kind) or {}
        if (rope_type := stated.get("rope_type", "default")) != "default":
            raise ValueError(f"rope_type={rope_type!r} is not supported; eqzoo has 'default'")
        if "rope_theta" in stated:
            options[name] = stated["rope_theta"]
    if kinds := options.pop("layer_types", None):
        is_global = [kind == "full_attention" for kind in kinds]
        every = next((layer for layer in range(1, len(kinds)) if is_global[layer]), len(kinds))
        if is_global != [layer % every == 0 for layer in range(len(kinds))]:
            raise ValueError(f"layer_types={kinds} is not supported; eqzoo has 'full_attention' in every n-th layer")
        options["global_attn_every_n_layers"] = every
    options["architectures"] = (options.get("architectures") or ["ModernBertModel"])[0]
    if _HEADS.get(options["architectures"]) not in CLASSIFIERS:
        return {**options, "num_labels": 0}
    labels = options.get("id2label")
    return {"num_labels": 2 if labels is None else len(labels), **options}


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it."""
    bases = {"full_attention": options.pop("global_rope_theta"), "sliding_attention": options.pop("local_rope_theta")}
    every = options.pop("global_attn_every_n_layers")
    layers = range(options["num_hidden_layers"])
    return {
        **written_labels(options, _HEADS),
        "pad_token_id": _PADDING if options["vocab_size"] > _PADDING else None,
        "layer_types": ["sliding_attention" if layer % every else "full_attention" for layer in layers],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
    }


OPTIONS = Options(
    {
        "vocab_size": "vocab",
        "hidden_size": "dim",
        "intermediate_size": "hidden",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "max_position_embeddings": "context",
        "global_attn_every_n_layers": "global_every",
        "local_attention": "window",
        "global_rope_theta": "global_base",
        "local_rope_theta": "local_base",
        "hidden_activation": Option("activation", _ACTIVATIONS),
        "classifier_activation": Option("head_activation", _ACTIVATIONS),
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "classifier_bias": "head_bias",
        "decoder_bias": "vocab_bias",
        "classifier_pooling": Option("pool", {"cls": "first", "mean": "mean"}),
        "architectures": Option("head", _HEADS),
        "num_labels": "num_classes",
        "embedding_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "mlp_dropout",
        "classifier_dropout": "head_dropout",
    },
    fixed={"tie_word_embeddings": True, "rope_scaling": None, "is_encoder_decoder": False, "is_decoder": False}
    | {"position_embedding_type": "absolute"},  # so the published files say, and mean nothing by it
    ignored=(
        *NOT_MATHEMATICS,
        "(cls|mask)_token_id|initializer_cutoff_factor|deterministic_flash_attn|reference_compile|repad_logits_with_grad",
        "sparse_prediction|sparse_pred_ignore_index",
        "layer_norm_eps",  # the published files repeat `norm_eps` by this name
    ),
    prepare=_prepare,
    restore=_restore,
)
