"""How transformers writes T5, T5 1.1, Flan-T5 and mT5 down."""

from dataclasses import replace
from typing import Any

from eqzoo.checkpoint import Alias, Drop, Rule, Transform, prefixed
from eqzoo.models._family import Option, Options
from eqzoo.models.language._transformers import NOT_MATHEMATICS

_ATTENTION = (
    Rule(r"q\.weight", "query.weight"),
    Rule(r"k\.weight", "key.weight"),
    Rule(r"v\.weight", "value.weight"),
    Rule(r"o\.weight", "out.weight"),
)
_OWN = (
    *prefixed(r"layer\.0\.SelfAttention\.", "attention.", _ATTENTION),
    Rule(r"layer\.0\.layer_norm\.weight", "norm1.weight"),
)
_MLP = (
    Rule(r"DenseReluDense\.wi\.weight", "mlp.fc1.weight"),
    Rule(r"DenseReluDense\.wo\.weight", "mlp.fc2.weight"),
    Rule(r"DenseReluDense\.wi_0\.weight", "mlp.gate.weight"),
    Rule(r"DenseReluDense\.wi_1\.weight", "mlp.up.weight"),
    Rule(r"DenseReluDense\.wo\.weight", "mlp.down.weight"),
    Rule(r"layer_norm\.weight", "norm2.weight"),
)
_CROSS = (
    *prefixed(r"layer\.1\.EncDecAttention\.", "cross_attention.", _ATTENTION),
    Rule(r"layer\.1\.layer_norm\.weight", "cross_norm.weight"),
)
_TOWER = (
    # Upstream's first block holds the positions of all.
    Rule(r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.weight", "positions"),
    Rule(r"final_layer_norm\.weight", "norm.weight"),
)
_REST = (
    *prefixed(r"encoder\.", "encoder.", _TOWER),
    *prefixed(r"encoder\.block\.(\d+)\.", "encoder.blocks[{0}].", (*_OWN, *prefixed(r"layer\.1\.", "", _MLP))),
    *prefixed(r"decoder\.", "decoder.", _TOWER),
    *prefixed(r"decoder\.block\.(\d+)\.", "decoder.blocks[{0}].", (*_OWN, *_CROSS, *prefixed(r"layer\.2\.", "", _MLP))),
    Alias(r"(en|de)coder\.embed_tokens\.weight", "shared.weight"),
    Drop(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
)

TRANSFORMERS = (
    Rule(r"shared\.weight", "embedding.weight"),
    Rule(r"lm_head\.weight", "head.weight"),
    Alias(r"lm_head\.weight", "shared.weight"),
    *_REST,
)
# A head that is tied but not scaled, as transformers 5 makes it, is a copy of the embedding here.
TRANSFORMERS_COPIED_HEAD = (
    Rule(
        r"shared\.weight",
        ("embedding.weight", "head.weight"),
        Transform(lambda tensor, shapes: [tensor, tensor], lambda parts: parts[0]),
    ),
    *_REST,
)

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATIONS |= {"silu": "silu", "swish": "silu"}
_ARCHITECTURES = ("T5ForConditionalGeneration", "T5WithLMHeadModel", "MT5ForConditionalGeneration")


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    """Of `feed_forward_proj`, gate and activation; a gated "gelu" means its approximation.

    transformers 4 scales a tied head and no other; 5 says whether it scales, whatever is tied.
    """
    defaults = {"num_layers": 6, "feed_forward_proj": "relu", "architectures": None, "decoder_start_token_id": 0}
    options = {**defaults, **options}
    (architecture, *_) = options.pop("architectures") or _ARCHITECTURES
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architectures={[architecture]} is not supported; eqzoo has {_ARCHITECTURES[0]!r}")
    proj = options.pop("feed_forward_proj")
    is_gated = proj.startswith("gated-")
    options["is_gated_act"] = is_gated
    options["dense_act_fn"] = "gelu_new" if proj == "gated-gelu" else proj.removeprefix("gated-")
    is_tied = options.pop("tie_word_embeddings", None) is not False
    options["tie_word_embeddings"] = options.pop("scale_decoder_outputs", is_tied)
    if options.get("num_decoder_layers") is None:
        options["num_decoder_layers"] = options["num_layers"]
    return options


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    activation, is_gated = options.pop("dense_act_fn"), options.pop("is_gated_act")
    if is_gated and activation == "gelu":
        raise ValueError("upstream has no gated MLP with activation='gelu', only 'gelu_tanh'; use `eqzoo.save`")
    if is_gated:
        activation = "gated-gelu" if activation == "gelu_new" else f"gated-{activation}"
    return {**options, "feed_forward_proj": activation, "is_encoder_decoder": True, "pad_token_id": 0}


OPTIONS = Options(
    {
        "vocab_size": "vocab",
        "d_model": "dim",
        "d_kv": "dim_head",
        "d_ff": "hidden",
        "num_layers": "depth",
        "num_decoder_layers": "decoder_depth",
        "num_heads": "heads",
        "n_positions": "context",
        "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
        "is_gated_act": "gated",
        "dense_act_fn": Option("activation", _ACTIVATIONS),
        "tie_word_embeddings": "tied_head",
        "decoder_start_token_id": "start",
        "dropout_rate": "dropout",
    },
    fixed={"is_encoder_decoder": True, "is_decoder": False, "tie_encoder_decoder": False},
    ignored=(*NOT_MATHEMATICS, "initializer_factor", "(cls|mask)_token_id"),
    prepare=_prepare,
    restore=_restore,
)
MT5_OPTIONS = replace(
    OPTIONS,
    prepare=lambda options: _prepare(
        {"feed_forward_proj": "gated-gelu", "num_layers": 8, **options, "scale_decoder_outputs": False}
    ),
)
