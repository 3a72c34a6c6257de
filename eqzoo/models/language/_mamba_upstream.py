"""What the files of Mamba and Mamba-2 have in common."""

from collections.abc import Sequence

from eqzoo.checkpoint import Alias, Rule, prefixed
from eqzoo.models._family import Option
from eqzoo.models.language._transformers import NOT_MATHEMATICS

# Options of both configs, and those that change no logit.
OPTIONS = {
    "vocab_size": "vocab",
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "expand": "expand",
    "state_size": "state",
    "conv_kernel": "kernel",
    "hidden_act": Option(
        "activation",
        {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
        | {"relu": "relu", "tanh": "tanh"},
    ),
    "use_bias": "use_bias",
    "use_conv_bias": "use_conv_bias",
    "layer_norm_epsilon": "norm_eps",
    "residual_in_fp32": "residual_in_float32",
    "tie_word_embeddings": "tied_head",
}
IGNORED = (
    *NOT_MATHEMATICS,
    r"time_step_(scale|min|max|floor|init_scheme)|rescale_prenorm_residual",  # a fresh model's
    r"use_mambapy|use_associative_scan|fused_add_norm|chunk_size",  # how it is computed
    r"intermediate_size|d_model|d_inner|n_layer|ssm_cfg|pad_vocab_size_multiple",  # what other options say too
)


def rules(
    block: Sequence[Rule], *, prefix: str = r"backbone\.", embedding: str = r"embeddings"
) -> tuple[Rule | Alias, ...]:
    """The rules of a model, given those of a block."""
    body = (
        Rule(rf"{embedding}\.weight", "embedding.weight"),
        *prefixed(r"layers\.(\d+)\.", "blocks[{0}].", block),
        Rule(r"norm_f\.weight", "norm.weight"),
    )
    # A model with a tied head has no `head.weight` for the rule to fill, so there the alias counts.
    head = Rule(r"lm_head\.weight", "head.weight")
    tied = Alias(r"lm_head\.weight", prefix.replace("\\", "") + f"{embedding}.weight")
    return (*prefixed(prefix, "", body), head, tied)
