"""What transformers calls the tensors and options of Mixtral and Qwen3-MoE, and where the tensors go on a mesh."""

from typing import Any

from jax.sharding import PartitionSpec as P

from eqzoo.checkpoint import SPLIT_EACH, Alias, Drop, Rule, prefixed
from eqzoo.models._family import Option, Options, Upstream
from eqzoo.models.language._rotary import read_rotary, write_rotary
from eqzoo.models.language._transformers import NOT_MATHEMATICS

_LAYER = (
    Rule(r"input_layernorm\.weight", "norm1.weight"),
    Rule(r"post_attention_layernorm\.weight", "norm2.weight"),
    Rule(r"self_attn\.q_proj\.(weight|bias)", "attention.query.{0}"),
    Rule(r"self_attn\.k_proj\.(weight|bias)", "attention.key.{0}"),
    Rule(r"self_attn\.v_proj\.(weight|bias)", "attention.value.{0}"),
    Rule(r"self_attn\.o_proj\.(weight|bias)", "attention.out.{0}"),
    Rule(r"self_attn\.q_norm\.weight", "attention.query_norm.weight"),
    Rule(r"self_attn\.k_norm\.weight", "attention.key_norm.weight"),
)
# All published files, and those that transformers 5 writes, hold each expert by itself.
_MIXTRAL = (
    Rule(r"block_sparse_moe\.gate\.weight", "mlp.router.weight"),
    Rule(r"block_sparse_moe\.experts\.(\d+)\.w1\.weight", "mlp.experts[{0}].gate.weight"),
    Rule(r"block_sparse_moe\.experts\.(\d+)\.w3\.weight", "mlp.experts[{0}].up.weight"),
    Rule(r"block_sparse_moe\.experts\.(\d+)\.w2\.weight", "mlp.experts[{0}].down.weight"),
)
_ROUTER_AND_DENSE = (
    Rule(r"mlp\.gate\.weight", "mlp.router.weight"),
    Rule(r"mlp\.(gate|up|down)_proj\.weight", "mlp.{0}.weight"),
)
_QWEN3 = (
    *_ROUTER_AND_DENSE,
    Rule(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", "mlp.experts[{0}].{1}.weight"),
)
# As in the memory of transformers 5.
_FUSED = (
    *_ROUTER_AND_DENSE,
    Rule(r"mlp\.experts\.gate_up_proj", ("mlp.experts[*].gate.weight", "mlp.experts[*].up.weight"), SPLIT_EACH),
    Rule(r"mlp\.experts\.down_proj", "mlp.experts[*].down.weight"),
)


def _rules(mlp: tuple[Rule, ...]) -> tuple[Rule | Drop | Alias, ...]:
    return (
        Rule(r"model\.embed_tokens\.weight", "embedding.weight"),
        *prefixed(r"model\.layers\.(\d+)\.", "blocks[{0}].", (*_LAYER, *mlp)),
        *prefixed(r"model\.layers\.(\d+)\.", "blocks.{0}.", (*_LAYER, *mlp)),
        Rule(r"model\.norm\.weight", "norm.weight"),
        Rule(r"lm_head\.weight", "head.weight"),
        Alias(r"lm_head\.weight", "model.embed_tokens.weight"),  # counts where the head is tied
        Drop(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),  # in old files
    )


MIXTRAL, QWEN3, FUSED = _rules(_MIXTRAL), _rules(_QWEN3), _rules(_FUSED)

_ALL: dict[str, str | Option] = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "dim_head",
    "num_experts_per_tok": "top_k",
    "hidden_act": Option(
        "activation",
        {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        | {"relu": "relu"},
    ),
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "rotary": "rotary",
    "sliding_window": "window",
    "tie_word_embeddings": "tied_head",
    "attention_dropout": "attention_dropout",
    "num_local_experts": "experts",
}
_DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "head_dim": None, "tie_word_embeddings": False}
_MIXTRAL_DEFAULTS = _DEFAULTS | {"sliding_window": None, "max_position_embeddings": 131072}
_QWEN3_DEFAULTS = _DEFAULTS | {
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "intermediate_size": 6144,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}


def _read(options: dict[str, Any], *, base: float) -> dict[str, Any]:
    """With None for a head of the usual width, and heads that turn as a whole."""
    options = read_rotary(options, context=options["max_position_embeddings"], base=base)
    if options["rotary"].partial != 1:
        raise ValueError(f"partial_rotary_factor={options['rotary'].partial} is not supported; eqzoo has 1.0")
    return options


def _with_usual_head(options: dict[str, Any], *, dim: int, heads: int) -> dict[str, Any]:
    usual = options.get("hidden_size", dim) / options.get("num_attention_heads", heads)
    return options | {"head_dim": None} if options["head_dim"] == usual else options


def _prepare_mixtral(options: dict[str, Any]) -> dict[str, Any]:
    options = _with_usual_head(_MIXTRAL_DEFAULTS | options, dim=4096, heads=32)
    if "num_experts" in options:
        options["num_local_experts"] = options.pop("num_experts")
    return _read(options, base=1e6)


def _prepare_qwen3(options: dict[str, Any]) -> dict[str, Any]:
    options = _with_usual_head(_QWEN3_DEFAULTS | options, dim=2048, heads=32)
    if "num_experts" in options:  # as transformers 4 has it
        options["num_local_experts"] = options.pop("num_experts")
    if not options.pop("use_sliding_window"):
        options["sliding_window"] = None
    dense, step = options.pop("mlp_only_layers") or (), options.pop("decoder_sparse_step")
    dense = [layer for layer in range(options["num_hidden_layers"]) if layer in dense or (layer + 1) % step]
    return _read(options, base=1e4) | {"mlp_only_layers": dense}


def _restore(options: dict[str, Any]) -> dict[str, Any]:
    if options["rotary"].partial != 1:
        raise ValueError(f"upstream turns whole heads, not {options['rotary'].partial} of one")
    usual = options["hidden_size"] // options["num_attention_heads"]
    return write_rotary(options | {"head_dim": options["head_dim"] or usual})


def _restore_qwen3(options: dict[str, Any]) -> dict[str, Any]:
    window, experts = options["sliding_window"], options["num_local_experts"]
    options = _restore(options | {"mlp_only_layers": list(options["mlp_only_layers"])})
    # transformers 4 and 5 have each their own name for the experts.
    return options | {"use_sliding_window": window is not None, "num_experts": experts, "decoder_sparse_step": 1}


_ROUTING_IN_TRAINING = ("router_aux_loss_coef",)

UPSTREAMS = {
    "transformers": Upstream(
        MIXTRAL,
        Options(
            _ALL | {"intermediate_size": "hidden"},
            fixed={"router_jitter_noise": 0.0},
            ignored=(*NOT_MATHEMATICS, *_ROUTING_IN_TRAINING),
            prepare=_prepare_mixtral,
            restore=_restore,
        ),
        names=("Mixtral-*",),
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        base="Mixtral-8x7B-v0.1",
    ),
    "transformers_qwen3": Upstream(
        QWEN3,
        Options(
            _ALL
            | {
                "intermediate_size": "dense_hidden",
                "moe_intermediate_size": "hidden",
                "mlp_only_layers": "dense_layers",
                "norm_topk_prob": "normalised",
                "attention_bias": "attention_bias",
            },
            ignored=(*NOT_MATHEMATICS, *_ROUTING_IN_TRAINING, "max_window_layers"),
            prepare=_prepare_qwen3,
            restore=_restore_qwen3,
        ),
        names=("Qwen3-*",),
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        base="Qwen3-30B-A3B",
    ),
    "transformers_5": Upstream(FUSED),
}

SHARDING = (
    # By columns: the vocabulary's size has no useful divisor.
    (r"embedding\.weight", P(None, ("model", "fsdp"))),
    (r".*attention\.(query|key|value)\.weight", P("model", "fsdp")),
    (r".*attention\.(query|key|value)\.bias", P("model")),
    (r".*attention\.out\.weight", P("fsdp", "model")),
    # Each device has a part of every expert, so that all have as much to do, whatever the tokens choose.
    (r".*mlp\.(experts\[\*\]\.)?(gate|up)\.weight", P("model", "fsdp")),
    (r".*mlp\.(experts\[\*\]\.)?down\.weight", P("fsdp", "model")),
    (r".*mlp\.router\.weight", P(None, "fsdp")),
    (r"head\.weight", P(None, ("model", "fsdp"))),
)
