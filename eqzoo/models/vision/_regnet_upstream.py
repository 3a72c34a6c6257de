"""How torchvision, timm and transformers write a RegNet down: names of tensors, and options."""

from functools import partial

from eqzoo.checkpoint import BATCH_NORM, Rule, prefixed, staged
from eqzoo.models._family import Option, Options, Upstream, count_labels


def _normed(source: str, target: str, *, conv: str, norm: str) -> tuple[Rule, ...]:
    """The rules of a convolution and its norm, of which upstream has its own names."""
    return (
        Rule(rf"{source}{conv}\.weight", f"{target}.conv.weight"),
        *prefixed(rf"{source}{norm}\.", f"{target}.norm.", BATCH_NORM),
    )


# A block's third layer is squeeze-and-excitation or already the last convolution: what the model lacks, the next fits.
_TORCHVISION_BLOCK = (
    *_normed(r"f\.a\.", "layers.0", conv="0", norm="1"),
    *_normed(r"f\.b\.", "layers.1", conv="0", norm="1"),
    Rule(r"f\.se\.fc(\d)\.(weight|bias)", "layers.2.fc{0}.{1}"),
    *_normed(r"f\.c\.", "layers.2", conv="0", norm="1"),
    *_normed(r"f\.c\.", "layers.3", conv="0", norm="1"),
    *_normed(r"proj\.", "shortcut", conv="0", norm="1"),
)

TORCHVISION = (
    *_normed(r"stem\.", "stem", conv="0", norm="1"),
    *staged(r"trunk_output\.block1\.block1-", "stages.0.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block2\.block2-", "stages.1.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block3\.block3-", "stages.2.", _TORCHVISION_BLOCK),
    *staged(r"trunk_output\.block4\.block4-", "stages.3.", _TORCHVISION_BLOCK),
    Rule(r"fc\.(weight|bias)", "head.{0}"),
)

_TIMM_BLOCK = (
    *_normed(r"conv1\.", "layers.0", conv="conv", norm="bn"),
    *_normed(r"conv2\.", "layers.1", conv="conv", norm="bn"),
    Rule(r"se\.fc(\d)\.(weight|bias)", "layers.2.fc{0}.{1}"),
    *_normed(r"conv3\.", "layers.2", conv="conv", norm="bn"),
    *_normed(r"conv3\.", "layers.3", conv="conv", norm="bn"),
    *_normed(r"downsample\.", "shortcut", conv="conv", norm="bn"),
    *_normed(r"downsample\.1\.", "pooled_shortcut", conv="conv", norm="bn"),
)

_TIMM_PRE_BLOCK = (
    *prefixed(r"norm(\d)\.", "norms.{0-1}.", BATCH_NORM),
    Rule(r"conv(\d)\.weight", "convs.{0-1}.weight"),
    Rule(r"se\.fc(\d)\.(weight|bias)", "squeeze_excite.0.fc{0}.{1}"),
    Rule(r"downsample\.weight", "shortcut.weight"),
    Rule(r"downsample\.1\.weight", "pooled_shortcut.weight"),
)

TIMM = (
    *_normed(r"stem\.", "stem", conv="conv", norm="bn"),
    Rule(r"stem\.weight", "stem.weight"),
    *staged(r"s(\d)\.b", "stages.{0-1}.", (*_TIMM_BLOCK, *_TIMM_PRE_BLOCK), start=1),
    *_normed(r"final_conv\.", "last", conv="conv", norm="bn"),
    Rule(r"head\.fc\.(weight|bias)", "head.{0}"),
)

_TRANSFORMERS_BLOCK = (
    *_normed(r"layer\.(\d)\.", "layers.{0}", conv="convolution", norm="normalization"),
    Rule(r"layer\.2\.attention\.0\.(weight|bias)", "layers.2.fc1.{0}"),
    Rule(r"layer\.2\.attention\.2\.(weight|bias)", "layers.2.fc2.{0}"),
    *_normed(r"shortcut\.", "shortcut", conv="convolution", norm="normalization"),
)

TRANSFORMERS_BODY = (
    *_normed(r"embedder\.embedder\.", "stem", conv="convolution", norm="normalization"),
    *staged(r"encoder\.stages\.(\d)\.layers\.", "stages.{0}.", _TRANSFORMERS_BLOCK),
)
TRANSFORMERS = (*prefixed(r"regnet\.", "", TRANSFORMERS_BODY), Rule(r"classifier\.1\.(weight|bias)", "head.{0}"))

# What timm computes widths and depths from comes with a variant's name, and so do they.
TIMM_OPTIONS = Options(
    {
        "stem_width": "stem_width",
        "se_ratio": "squeeze_excite",
        "downsample": Option("shortcut", {"conv1x1": "conv", "avg": "pool", None: "none"}),
        "linear_out": "linear_out",
        "preact": "pre_activation",
        "num_features": "last_width",
        "act_layer": Option("activation", {"relu": "relu", "silu": "silu"}),
        "in_chans": "in_channels",
        "num_classes": "num_classes",
    },
    fixed={"global_pool": "avg", "output_stride": 32},
    ignored=(r"drop_(path_)?rate", "zero_init_last"),
)

TRANSFORMERS_OPTIONS = Options(
    {
        "layer_type": Option("squeeze_excite", {"x": 0.0, "y": 0.25}),
        "depths": "depths",
        "hidden_sizes": "widths",
        "groups_width": "group_size",
        "embedding_size": "stem_width",
        "num_channels": "in_channels",
        "num_labels": "num_classes",
    },
    fixed={"hidden_act": "relu", "downsample_in_first_stage": True},
    lenient=True,
    prepare=partial(count_labels, classifier="RegNetForImageClassification", body="RegNetModel"),
)

UPSTREAMS = {
    "torchvision": Upstream(TORCHVISION, Options({"num_classes": "num_classes"}), names=("regnet_x_*", "regnet_y_*")),
    "timm": Upstream(TIMM, TIMM_OPTIONS, names=("regnetx_*", "regnety_*", "regnetv_*", "regnetz_*")),
    "transformers": Upstream(
        TRANSFORMERS,
        TRANSFORMERS_OPTIONS,
        names=("regnetx_[0-9][0-9][0-9]", "regnety_[0-9][0-9][0-9]", "regnety_1280"),
        model_type="regnet",
        architecture="RegNetForImageClassification",
        base="regnety_040",
    ),
    "transformers_body": Upstream(TRANSFORMERS_BODY),
}
