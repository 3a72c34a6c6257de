"""What transformers calls GPT-NeoX's tensors and options, and where the tensors go on a mesh."""

from typing import Any

from jax.sharding import PartitionSpec as P

from eqzoo import nn
from eqzoo.checkpoint import Alias, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options
from eqzoo.models.language._rotary import read_rotary, write_rotary
from eqzoo.models.language._transformers import NOT_MATHEMATICS

_BLOCK = (
    Rule(r"input_layernorm\.(weight|bias)", "norm1.{0}"),
    Rule(r"post_attention_layernorm\.(weight|bias)", "norm2.{0}"),
    Rule(r"attention\.query_key_value\.(weight|bias)", "attention.qkv.{0}"),
    Rule(r"attention\.dense\.(weight|bias)", "attention.out.{0}"),
    Rule(r"mlp\.dense_h_to_4h\.(weight|bias)", "mlp.fc1.{0}"),
    Rule(r"mlp\.dense_4h_to_h\.(weight|bias)", "mlp.fc2.{0}"),
)

_BODY = (
    Rule(r"gpt_neox\.embed_in\.weight", "embedding.weight"),
    *prefixed(r"gpt_neox\.layers\.(\d+)\.", "blocks[{0}].", _BLOCK),
    Rule(r"gpt_neox\.final_layer_norm\.(weight|bias)", "norm.{0}"),
    # What old files also hold: masks and frequencies.
    Drop(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"),
)

# transformers 4, and so every published file, calls the head `embed_out`; 5 reads and writes that name too, but calls
# it `lm_head` in memory.
TRANSFORMERS = (
    *_BODY,
    Rule(r"embed_out\.weight", "head.weight"),
    Alias(r"embed_out\.weight", "gpt_neox.embed_in.weight"),
)
TRANSFORMERS_5 = (
    *_BODY,
    Rule(r"lm_head\.weight", "head.weight"),
    Alias(r"lm_head\.weight", "gpt_neox.embed_in.weight"),
)


# transformers 4 has names of its own for these, and 4.4x wrote both.
_ROTARY = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    for name, usual in _ROTARY.items():
        if name in options and options.get(usual, options[name]) != options[name]:
            raise ValueError(f"{name}={options[name]!r} contradicts {usual}={options[usual]!r}")
    options = {"hidden_act": "gelu"} | {_ROTARY.get(name, name): value for name, value in options.items()}
    return read_rotary(options, context=2048, partial=0.25)


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    rotary: nn.Rotary = options["rotary"]
    return write_rotary(options) | {"rotary_emb_base": rotary.base, "rotary_pct": rotary.partial}


OPTIONS = Options(
    {
        "vocab_size": "vocab",
        "max_position_embeddings": "context",
        "hidden_size": "dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "heads",
        "intermediate_size": "hidden",
        "hidden_act": Option(
            "activation",
            {"gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
            | {"relu": "relu", "silu": "silu", "swish": "silu"},
        ),
        "layer_norm_eps": "norm_eps",
        "rotary": "rotary",
        "use_parallel_residual": "parallel",
        "attention_bias": "attention_bias",
        "tie_word_embeddings": "tied_head",
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "residual_dropout",
    },
    ignored=NOT_MATHEMATICS,
    prepare=_prepare,
    restore=_restore,
)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.qkv\.weight", P("model", "fsdp")),
    (r".*attention\.qkv\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.fc1\.weight", P("model", "fsdp")),
    (r".*mlp\.fc1\.bias", P("model")),
    (r".*mlp\.fc2\.weight", P("fsdp", "model")),
    (r"head\.weight", P(None, ("model", "fsdp"))),
)
