"""How transformers writes down Llama and its relatives: the names of tensors, and the options of each config.json."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from eqzoo.checkpoint import SPLIT, Alias, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options, Upstream
from eqzoo.models.language._rotary import read_rotary, write_rotary
from eqzoo.models.language._transformers import NOT_MATHEMATICS

Names = tuple[Rule | Drop | Alias, ...]

_PROJECTIONS = tuple(
    Rule(rf"self_attn\.{theirs}_proj\.(weight|bias)", f"attention.{ours}.{{0}}")
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))
)
_QK_NORMS = (
    Rule(r"self_attn\.q_norm\.weight", "attention.query_norm.weight"),
    Rule(r"self_attn\.k_norm\.weight", "attention.key_norm.weight"),
)
_MLP = (Rule(r"mlp\.(gate|up|down)_proj\.(weight|bias)", "mlp.{0}.{1}"),)
_NORMS = (
    Rule(r"input_layernorm\.weight", "norm1.weight"),
    Rule(r"post_attention_layernorm\.weight", "norm2.weight"),
)
_POST_NORMS = (
    Rule(r"post_attention_layernorm\.weight", "norm1.weight"),
    Rule(r"post_feedforward_layernorm\.weight", "norm2.weight"),
)
_FUSED = (
    Rule(
        r"self_attn\.qkv_proj\.weight", tuple(f"attention.{name}.weight" for name in ("query", "key", "value")), SPLIT
    ),
    Rule(r"self_attn\.o_proj\.weight", "attention.out.weight"),
    Rule(r"mlp\.gate_up_proj\.weight", ("mlp.gate.weight", "mlp.up.weight"), SPLIT),
    Rule(r"mlp\.down_proj\.weight", "mlp.down.weight"),
)


def _named(block: tuple[Rule, ...]) -> Names:
    return (
        Rule(r"model\.embed_tokens\.weight", "embedding.weight"),
        *prefixed(r"model\.layers\.(\d+)\.", "blocks[{0}].", block),
        Rule(r"model\.norm\.weight", "norm.weight"),
        Rule(r"lm_head\.weight", "head.weight"),
        Alias(r"lm_head\.weight", "model.embed_tokens.weight"),  # counts where the head is tied
        Drop(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # in old files
    )


LLAMA = _named((*_PROJECTIONS, *_QK_NORMS, *_MLP, *_NORMS))
OLMO2 = _named((*_PROJECTIONS, *_QK_NORMS, *_MLP, *_POST_NORMS))
PHI3 = _named((*_FUSED, *_NORMS))

_ALL: dict[str, str | Option] = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "intermediate_size": "hidden",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "dim_head",
    "hidden_act": Option(
        "activation",
        {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        | {"relu": "relu"},
    ),
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "rotary": "rotary",
    "tie_word_embeddings": "tied_head",
    "attention_dropout": "attention_dropout",
}
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
_BIAS = {"attention_bias": Option("attention_bias", {False: "none", True: "all"})}
_WINDOWS: dict[str, str | Option] = {"sliding_window": "window", "windowed": "windowed"}


def _prepare(
    options: dict[str, Any],
    *,
    defaults: Mapping[str, Any],
    rotary: Mapping[str, Any],
    whole: bool,
    layers: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Options of which none is left unsaid, with None for what is as usual; `whole` heads turn, or part of each."""
    options = {**_DEFAULTS, **defaults, **options}
    heads = options["num_attention_heads"]
    if options["num_key_value_heads"] == heads:
        options["num_key_value_heads"] = None
    if options["head_dim"] is not None and options["head_dim"] * heads == options["hidden_size"]:
        options["head_dim"] = None
    options = read_rotary(options, context=options["max_position_embeddings"], **rotary)
    if whole and options["rotary"].partial != 1:
        raise ValueError(f"partial_rotary_factor={options['rotary'].partial} is not supported; eqzoo has 1.0")
    return layers(options)


def _restore(
    options: dict[str, Any], *, whole: bool, layers: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    heads, partial = options["num_attention_heads"], options["rotary"].partial
    if whole and partial != 1:
        raise ValueError(f"upstream turns whole heads, not {partial} of one")
    said = {
        "num_key_value_heads": options["num_key_value_heads"] or heads,
        "head_dim": options["head_dim"] or options["hidden_size"] // heads,
    }
    return layers(write_rotary(options | said))


def _alike(options: dict[str, Any]) -> dict[str, Any]:
    return options


def _read_windows(options: dict[str, Any]) -> dict[str, Any]:
    """`layer_types`, or what came before it, as which layers have a window."""
    options = dict(options)
    windows, first = options.pop("use_sliding_window"), options.pop("max_window_layers", 0)
    depth, types = options["num_hidden_layers"], options.pop("layer_types", None)
    types = (
        ["sliding_attention" if layer >= first else "full_attention" for layer in range(depth)]
        if types is None
        else types
    )
    if unknown := {*types} - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types={sorted(unknown)} is not supported; eqzoo has sliding_attention, full_attention")
    if len(types) != depth:
        raise ValueError(f"layer_types speaks of {len(types)} layers, but there are {depth}")
    windowed = [kind == "sliding_attention" for kind in types]
    if not windows or options["sliding_window"] is None or not any(windowed):
        return options | {"sliding_window": None, "windowed": None}
    return options | {"windowed": None if all(windowed) else windowed}


def _write_windows(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    depth, window, windowed = options["num_hidden_layers"], options["sliding_window"], options.pop("windowed")
    windowed = [window is not None] * depth if windowed is None else windowed
    types = ["sliding_attention" if each else "full_attention" for each in windowed]
    return options | {"use_sliding_window": window is not None, "layer_types": types, "max_window_layers": depth}


def _read_smollm3(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    rotated, interval = options.pop("no_rope_layers", None), options.pop("no_rope_layer_interval", 4)
    depth = options["num_hidden_layers"]
    rotated = [(layer + 1) % interval != 0 for layer in range(depth)] if rotated is None else rotated
    rotated = [bool(each) for each in rotated[:depth]]
    if options.get("layer_types") is None:
        options["layer_types"] = ["full_attention" if each else "sliding_attention" for each in rotated]
    return _read_windows(options) | {"rotated": None if all(rotated) else rotated}


def _write_smollm3(options: dict[str, Any]) -> dict[str, Any]:
    options = _write_windows(options)
    del options["max_window_layers"]
    rotated = options.pop("rotated") or [True] * options["num_hidden_layers"]
    return options | {"no_rope_layers": [int(each) for each in rotated]}


def _write_phi3(options: dict[str, Any]) -> dict[str, Any]:
    """Upstream reads the original context from a place of its own."""
    original = options["rope_parameters"].get("original_max_position_embeddings", options["max_position_embeddings"])
    return options | {"original_max_position_embeddings": original}


def _write_granite(options: dict[str, Any]) -> dict[str, Any]:
    scale = options["attention_multiplier"]
    return options | {"attention_multiplier": options["head_dim"] ** -0.5 if scale is None else scale}


def _upstream(
    model_type: str,
    architecture: str,
    base: str,
    rules: Names,
    table: Mapping[str, str | Option],
    *,
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    ignored: tuple[str, ...] = (),
    rotary: Mapping[str, Any] | None = None,
    whole: bool = True,
    read: Callable[[dict[str, Any]], dict[str, Any]] = _alike,
    write: Callable[[dict[str, Any]], dict[str, Any]] = _alike,
) -> Upstream:
    options = Options(
        {**_ALL, **table},
        fixed=fixed or {},
        ignored=(*NOT_MATHEMATICS, *ignored),
        prepare=partial(_prepare, defaults=defaults, rotary=rotary or {}, whole=whole, layers=read),
        restore=partial(_restore, whole=whole, layers=write),
    )
    return Upstream(rules, options, names=("*",), model_type=model_type, architecture=architecture, base=base)


# A model is exported as the first that has all of its options.
UPSTREAMS = {
    "transformers": _upstream(
        "llama",
        "LlamaForCausalLM",
        "Llama-2-7b",
        LLAMA,
        {**_BIAS, "mlp_bias": "mlp_bias"},
        defaults={"attention_bias": False, "mlp_bias": False},
    ),
    "transformers_mistral": _upstream(
        "mistral",
        "MistralForCausalLM",
        "Mistral-7B-v0.1",
        LLAMA,
        {"sliding_window": "window"},
        defaults={
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "transformers_qwen2": _upstream(
        "qwen2",
        "Qwen2ForCausalLM",
        "Qwen2.5-7B",
        LLAMA,
        _WINDOWS,
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        ignored=("use_mrope",),  # upstream doesn't read it
        read=_read_windows,
        write=_write_windows,
    ),
    "transformers_qwen3": _upstream(
        "qwen3",
        "Qwen3ForCausalLM",
        "Qwen3-8B",
        LLAMA,
        {**_BIAS, **_WINDOWS},
        defaults={
            "vocab_size": 151936,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        read=_read_windows,
        write=_write_windows,
    ),
    "transformers_smollm3": _upstream(
        "smollm3",
        "SmolLM3ForCausalLM",
        "SmolLM3-3B",
        LLAMA,
        {**_BIAS, **_WINDOWS, "mlp_bias": "mlp_bias", "rotated": "rotated"},
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        ignored=("max_window_layers",),
        rotary={"base": 2000000.0},
        read=_read_smollm3,
        write=_write_smollm3,
    ),
    "transformers_phi3": _upstream(
        "phi3",
        "Phi3ForCausalLM",
        "Phi-3-mini-4k",
        PHI3,
        {"sliding_window": "window", "resid_pdrop": "residual_dropout"},
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "resid_pdrop": 0.0,
        },
        fixed={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        ignored=("embd_pdrop", "full_attn_mod", "interpolate_factor"),  # upstream reads none of them
        rotary={"longrope": ("longrope", "su", "yarn")},
        whole=False,
        write=_write_phi3,
    ),
    "transformers_olmo2": _upstream(
        "olmo2",
        "Olmo2ForCausalLM",
        "OLMo-2-1124-7B",
        OLMO2,
        _BIAS,
        defaults={"vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False},
    ),
    "transformers_granite": _upstream(
        "granite",
        "GraniteForCausalLM",
        "granite-3.0-2b",
        LLAMA,
        {
            **_BIAS,
            "mlp_bias": "mlp_bias",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention_scale",
            "logits_scaling": "logit_divisor",
        },
        defaults={
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        write=_write_granite,
    ),
}
