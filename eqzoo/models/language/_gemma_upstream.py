"""What transformers calls Gemma's tensors and options, and where the tensors go on a mesh."""

from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec as P

from eqzoo import nn
from eqzoo.checkpoint import Alias, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options
from eqzoo.models.language._rotary import read_rotary, write_rotary
from eqzoo.models.language._transformers import NOT_MATHEMATICS

_LAYER = (
    Rule(r"input_layernorm\.weight", "norm1.weight"),
    Rule(r"self_attn\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"self_attn\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"self_attn\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"self_attn\.o_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"self_attn\.q_norm\.weight", "attention.query_norm.weight"),
    Rule(r"self_attn\.k_norm\.weight", "attention.key_norm.weight"),
    Rule(r"mlp\.(gate|up|down)_proj\.weight", "mlp.{0}.weight"),
)
# What is called `post_attention_layernorm` comes before the MLP in the first version, and before the sum since.
_LAYER_1 = (*_LAYER, Rule(r"post_attention_layernorm\.weight", "norm2.weight"))
_LAYER_2 = (
    *_LAYER,
    Rule(r"post_attention_layernorm\.weight", "post_norm1.weight"),
    Rule(r"pre_feedforward_layernorm\.weight", "norm2.weight"),
    Rule(r"post_feedforward_layernorm\.weight", "post_norm2.weight"),
)


def _rules(
    layer: tuple[Rule, ...], body: str = r"model\.", head: str = r"lm_head\.weight"
) -> tuple[Rule | Drop | Alias, ...]:
    return (
        Rule(rf"{body}embed_tokens\.weight", "embedding.weight"),
        *prefixed(rf"{body}layers\.(\d+)\.", "blocks[{0}].", layer),
        Rule(rf"{body}norm\.weight", "norm.weight"),
        # A model with a tied head has no `head.weight` for the rule to fill, so there the alias counts.
        Rule(head, "head.weight"),
        Alias(head, f"{body}embed_tokens.weight".replace("\\", "")),
    )


GEMMA, GEMMA2 = _rules(_LAYER_1), _rules(_LAYER_2)

# Gemma 3's text part in the files of the whole model, and in the memory of transformers 5.
_IMAGES = Drop(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
GEMMA3_WHOLE = (*_rules(_LAYER_2, r"language_model\.model\.", r"language_model\.lm_head\.weight"), _IMAGES)
GEMMA3_WHOLE_5 = (*_rules(_LAYER_2, r"model\.language_model\."), _IMAGES)

_KINDS = {"sliding_attention": "local", "full_attention": "global"}


def _read_pattern(options: dict[str, Any], *, period: int, depth: int) -> dict[str, Any]:
    """Options in which `layer_types` has one period; without them, each `period`th layer is global."""
    options = dict(options)
    period, depth = options.pop("sliding_window_pattern", period), options.get("num_hidden_layers", depth)
    types = options.pop("layer_types", None) or [
        "full_attention" if number % period == 0 else "sliding_attention" for number in range(1, depth + 1)
    ]
    if unknown := {*types} - {*_KINDS}:
        raise ValueError(f"layer_types has {min(unknown)!r}, which is not supported; eqzoo has {', '.join(_KINDS)}")
    if len(types) != depth:
        raise ValueError(f"layer_types has {len(types)} entries for num_hidden_layers={depth}")
    repeats = lambda period: all(each == types[number % period] for number, each in enumerate(types))
    shortest = next(filter(repeats, range(1, depth + 1)))
    return options | {"layer_types": [_KINDS[each] for each in types[:shortest]]}


def _write_pattern(options: dict[str, Any]) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    pattern = options["layer_types"]
    types = [names[pattern[layer % len(pattern)]] for layer in range(options["num_hidden_layers"])]
    return options | {"layer_types": types}


def _without_none(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names or value is not None}


def _prepare(options: dict[str, Any]) -> dict[str, Any]:
    options = _without_none(options, "hidden_activation", "use_bidirectional_attention")
    if options.get("hidden_act") == "gelu":  # the published files', which mean the approximation
        options["hidden_act"] = "gelu_pytorch_tanh"
    return read_rotary(options, context=8192)


def _prepare_2(options: dict[str, Any]) -> dict[str, Any]:
    options = _without_none(options, "use_bidirectional_attention")
    return read_rotary(_read_pattern(options, period=2, depth=26), context=8192)


def _restore_2(options: dict[str, Any]) -> dict[str, Any]:
    return write_rotary(_write_pattern(options))


_DEFAULTS_3 = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "sliding_window": 4096}


def _prepare_3(options: dict[str, Any]) -> dict[str, Any]:
    options = _without_none(options, "use_bidirectional_attention", "attn_logit_softcapping", "rope_scaling")
    options = _read_pattern(_DEFAULTS_3 | options, period=6, depth=26)
    nested = options.pop("rope_parameters", None) or {}
    if unknown := nested.keys() - {*_KINDS}:
        raise ValueError(f"rope_parameters has {min(unknown)!r}, which is no kind of layer that eqzoo has")
    of_old = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    said = {kind: {"rope_theta": options.pop(old)} if old in options else {} for kind, old in of_old.items()}
    said["full_attention"] |= options.pop("rope_scaling", {})
    read = lambda kind, base: read_rotary(
        {"rope_parameters": said[kind] | (nested.get(kind) or {})},
        context=options.get("max_position_embeddings", 131072),
        base=base,
    )["rotary"]
    return options | {"rotary": read("full_attention", 1e6), "local_rotary": read("sliding_attention", 1e4)}


def _prepare_3_whole(options: dict[str, Any]) -> dict[str, Any]:
    of_images = ("text_config", "vision_config", "mm_tokens_per_image")
    options = {name: value for name, value in options.items() if name not in of_images} | options["text_config"]
    return _prepare_3({name: value for name, value in options.items() if not name.endswith("_token_index")})


def _restore_3(options: dict[str, Any]) -> dict[str, Any]:
    local: nn.Rotary = options["local_rotary"] or options["rotary"]
    of_local = write_rotary({"rotary": local})["rope_parameters"]
    options = write_rotary({name: value for name, value in options.items() if name != "local_rotary"})
    nested = {"full_attention": options["rope_parameters"], "sliding_attention": of_local}
    return _write_pattern(options) | {"rope_parameters": nested, "rope_local_base_freq": local.base}


_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS |= {"relu": "relu", "silu": "silu", "swish": "silu"}

_TABLE: dict[str, str | Option] = {
    "vocab_size": "vocab",
    "max_position_embeddings": "context",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "dim_head",
    "intermediate_size": "hidden",
    "rms_norm_eps": "norm_eps",
    "rotary": "rotary",
    "attention_bias": "attention_bias",
    "tie_word_embeddings": "tied_head",
    "attention_dropout": "attention_dropout",
}
_TABLE_2 = _TABLE | {
    "hidden_activation": Option("activation", _ACTIVATIONS),
    "layer_types": "pattern",
    "sliding_window": "window",
    "query_pre_attn_scalar": "query_scalar",
    "final_logit_softcapping": "final_cap",
}

GEMMA_OPTIONS = Options(
    _TABLE | {"hidden_act": Option("activation", _ACTIVATIONS)},
    fixed={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    ignored=NOT_MATHEMATICS,
    prepare=_prepare,
    restore=write_rotary,
)
GEMMA2_OPTIONS = Options(
    _TABLE_2 | {"attn_logit_softcapping": "attention_cap"},
    fixed={"use_bidirectional_attention": False},
    ignored=(*NOT_MATHEMATICS, "hidden_act"),
    prepare=_prepare_2,
    restore=_restore_2,
)
GEMMA3_OPTIONS = Options(
    _TABLE_2 | {"local_rotary": "local_rotary"},
    fixed={"use_bidirectional_attention": False},
    ignored=(*NOT_MATHEMATICS, "hidden_act", "_sliding_window_pattern"),
    prepare=_prepare_3,
    restore=_restore_3,
)

GEMMA3_WHOLE_OPTIONS = replace(GEMMA3_OPTIONS, prepare=_prepare_3_whole)

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    (r".*mlp\.(gate|up)\.weight", P("model", "fsdp")),
    (r".*mlp\.down\.weight", P("fsdp", "model")),
    (r"head\.weight", P(None, ("model", "fsdp"))),
)
