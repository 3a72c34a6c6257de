"""MobileNet is torchvision's four networks and timm's two: every variant's names, shapes and options; outputs,
gradients and a training step of every kind of block."""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d, Conv2dSame, get_act_layer
from timm.models._efficientnet_blocks import SqueezeExcite
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet as TimmEfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from torchvision.models import get_model, get_model_weights
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.mnasnet import MNASNet
from torchvision.models.mobilenetv2 import MobileNetV2

from eqzoo import export, freeze, nn
from eqzoo._model import _merge, _skeleton
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models._family import Family, Upstream
from eqzoo.models.vision._mobilenet_config import Run, scaled, table
from eqzoo.models.vision.mobilenet import (
    FAMILY,
    TIMM,
    TORCHVISION_MNASNET,
    TORCHVISION_V2,
    TORCHVISION_V3_SMALL,
    VARIANTS,
    MobileNet,
    MobileNetConfig,
    _torchvision_efficientnet,
)
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_results,
    from_torch,
    randomise,
)

# The modules that the mathematics of this family is made of. Anything else in an upstream model needs a look.
KNOWN = {
    *("Sequential", "Conv2d", "BatchNorm2d", "Linear", "Dropout", "Identity", "AdaptiveAvgPool2d"),
    *("ReLU", "ReLU6", "SiLU", "Hardswish", "Sigmoid", "Hardsigmoid"),
    # torchvision
    *("MobileNetV2", "MobileNetV3", "MNASNet", "EfficientNet", "Conv2dNormActivation", "InvertedResidual"),
    *("_InvertedResidual", "MBConv", "FusedMBConv", "SqueezeExcitation", "StochasticDepth"),
    # timm
    *("ConvBnAct", "DepthwiseSeparableConv", "EdgeResidual", "UniversalInvertedResidual", "ConvNormAct"),
    *("Conv2dSame", "MixedConv2d", "BatchNormAct2d", "SqueezeExcite", "SelectAdaptivePool2d", "FastAdaptiveAvgPool"),
    *(
        "Flatten",
        "HardSwish",
        "HardSigmoid",
        "GELU",
        "Swish",
        "SwishMe",
        "LayerScale2d",
        "MobileAttention",
        "MultiQueryAttention2d",
    ),
}
ACTIVATIONS = {"ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu", "Hardswish": "hard_swish", "GELU": "gelu"}

TORCHVISION_VARIANTS = {
    name.removeprefix("torchvision/"): (naming, name)
    for naming, upstream in FAMILY.upstreams.items()
    for name in VARIANTS
    if naming.startswith("torchvision") and upstream.has(name)
}


def only(naming: str) -> Family:
    """The family with one of its namings, for a comparison with all takes seconds."""
    return FAMILY._replace(upstreams={naming: FAMILY.upstreams[naming]})


def norms(model: torch.nn.Module) -> set[tuple[float, float]]:
    return {(each.eps, each.momentum) for each in model.modules() if isinstance(each, torch.nn.BatchNorm2d)}


def parameters(config: MobileNetConfig) -> int:
    model, _ = _skeleton(lambda key: MobileNet(config, key=key))
    return sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))


def test_every_model_of_torchvisions_modules_is_there():
    modules = {f"torchvision.models.{name}" for name in ("mobilenetv2", "mobilenetv3", "efficientnet", "mnasnet")}
    builders = {name: torchvision.models.get_model_builder(name) for name in torchvision.models.list_models()}
    assert {name for name, builder in builders.items() if builder.__module__ in modules} == {*TORCHVISION_VARIANTS}


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_options_names_and_shapes(name):
    naming, ours = TORCHVISION_VARIANTS[name]
    config = VARIANTS[ours]
    with torch.device("meta"):
        upstream = get_model(name)
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    assert norms(upstream) == {(config.norm_eps, config.norm_momentum)}
    assert {each.p for each in upstream.modules() if isinstance(each, torch.nn.Dropout)} == {config.dropout}
    rates = [each.p for each in upstream.modules() if type(each).__name__ == "StochasticDepth"]
    number = len(list(config.blocks))
    assert rates == ([config.drop_path * index / number for index in range(number)] if config.drop_path else [])
    assert_names_and_shapes((only(naming), config), upstream.state_dict())
    for weights in get_model_weights(name):
        assert weights.meta["num_params"] == parameters(config)


TIMM_VARIANTS = {name.removeprefix("timm/"): VARIANTS[name] for name in VARIANTS if FAMILY.upstreams["timm"].has(name)}
MODULES = ("efficientnet", "mobilenetv3", "hardcorenas")
# Other norms, other attention, space to depth, mixed experts, blurred strides, hand-pruned widths.
LEFT_OUT = {
    *("efficientnet_b0_gn", "efficientnet_b0_g8_gn", "efficientnet_b3_gn", "efficientnet_b3_g8_gn"),
    *("test_efficientnet_gn", "test_efficientnet_ln", "test_efficientnet_evos", "gc_efficientnetv2_rw_t"),
    *("efficientnet_x_b3", "efficientnet_x_b5", "efficientnet_h_b5", "efficientnet_blur_b0"),
    *("efficientnet_cc_b0_4e", "efficientnet_cc_b0_8e", "efficientnet_cc_b1_8e"),
    *("tf_efficientnet_cc_b0_4e", "tf_efficientnet_cc_b0_8e", "tf_efficientnet_cc_b1_8e"),
    *("efficientnet_b1_pruned", "efficientnet_b2_pruned", "efficientnet_b3_pruned"),
    *("mobilenetv4_conv_aa_medium", "mobilenetv4_conv_blur_medium", "mobilenetv4_conv_aa_large"),
}


def test_every_model_of_timms_modules_is_there():
    names = {name for module in MODULES for name in timm.list_models(module=module)}
    assert names == {*TIMM_VARIANTS} | LEFT_OUT
    assert not LEFT_OUT & {*TIMM_VARIANTS}


def timms_block(block: torch.nn.Module) -> tuple[Any, ...]:
    """What names and shapes don't say: strides, groups, paddings, activations, gates, and whether it has a shortcut."""
    convs = [each for each in block.modules() if isinstance(each, torch.nn.Conv2d) and each.bias is None]
    activations = [ACTIVATIONS.get(type(each.act).__name__) for each in block.modules() if type(each) is BatchNormAct2d]
    if type(block).__name__ == "MobileAttention":  # whose projections are 1x1 convolutions, and which has no activation
        convs = [conv for conv in convs if conv.kernel_size != (1, 1)]
        activations = activations[:1] * len(convs)
    gate = getattr(block, "se", None)
    gated = None if not hasattr(gate, "gate") else (type(gate.act1).__name__, type(gate.gate).__name__)
    return (
        [(each.stride, each.groups, isinstance(each, Conv2dSame) or each.padding) for each in convs],
        activations,
        gated and (ACTIVATIONS[gated[0]], {"Sigmoid": "sigmoid", "Hardsigmoid": "hard_sigmoid"}[gated[1]]),
        block.has_skip,
    )


def parts_of(block: Any, *kinds: type) -> list[Any]:
    is_part = lambda node: isinstance(node, kinds)
    return [part for part in jax.tree.leaves(block, is_leaf=is_part) if is_part(part)]


def our_block(block: Any) -> tuple[Any, ...]:
    named = {function: name for name, function in nn.ACTIVATIONS.items()}
    gate = getattr(block, "squeeze_excite", None)
    bricks = parts_of(block, nn.ConvNorm, nn.MixedConvNorm)
    convs = [conv for brick in bricks for conv in parts_of(brick, nn.Conv2d)]
    return (
        [(conv.stride, conv.groups, timms_padding(conv)) for conv in convs],
        [brick.activation and named[brick.activation] for brick in bricks],
        gate and (named[gate.activation], named[gate.gate]),
        block.drop_path is not None,
    )


def timms_padding(conv: nn.Conv2d) -> Any:
    """At stride 1, timm says TensorFlow's padding as a number."""
    size = conv.weight.shape[-1]
    return (size // 2, size // 2) if conv.stride == (1, 1) else conv.padding == "same_tf" or conv.padding


@pytest.mark.parametrize("name", TIMM_VARIANTS)
def test_timm_variant_has_the_same_options_names_and_shapes(name):
    config = TIMM_VARIANTS[name]
    with torch.device("meta"):
        upstream = timm.create_model(name, **({"bn_eps": 1e-3} if name == "fbnetc_100" else {})).eval()
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    if not config.dropout:  # of names that torchvision has too, the momentum is the same
        assert config.drop_path == 0
    assert norms(upstream) == {(config.norm_eps, config.norm_momentum)}
    assert_names_and_shapes((only("timm"), config), upstream.state_dict())
    model, _ = _skeleton(partial(MobileNet, config))
    blocks = [block for blocks in upstream.blocks for block in blocks]
    for (stage, start, position), theirs in zip(config.blocks, blocks, strict=True):
        run = model.stages[stage][start]
        assert our_block(run.rest.block if position else run.first) == timms_block(theirs), (stage, start, position)


# One of each way in which stages take their strides.
@pytest.mark.parametrize(
    ("name", "output_stride"),
    [
        *(("mobilenetv1_100", 32), ("mobilenetv3_small_100", 32), ("test_efficientnet", 32)),
        *(("mobilenetv4_conv_small", 32), ("mixnet_s", 32), ("test_efficientnet", 8)),
    ],
)
def test_feature_maps_are_timms(name, output_stride):
    with torch.device("meta"):
        upstream = timm.create_model(name, **({} if output_stride == 32 else {"output_stride": output_stride}))
    theirs = [(each["num_chs"], each["reduction"]) for each in upstream.feature_info]
    assert feature_sizes(replace(TIMM_VARIANTS[name], output_stride=output_stride)) == theirs


def feature_sizes(config: MobileNetConfig) -> list[tuple[int, int]]:
    """Width and stride of each feature map."""
    make = partial(eqx.nn.make_with_state(MobileNet), config)
    maps = eqx.filter_eval_shape(lambda: freeze(*make(key=jax.random.key(0))).features(jnp.zeros((64, 64, 3))))
    return [(each.shape[-1], 64 // each.shape[0]) for each in maps]


def images(channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(4, 71, 62, channels)).astype(np.float32)


def torchvision_norm(config: MobileNetConfig) -> Any:
    return partial(torch.nn.BatchNorm2d, eps=config.norm_eps, momentum=config.norm_momentum)


def torchvision_pair(network: str) -> tuple[MobileNetConfig, torch.nn.Module]:
    """A tiny network of each of torchvision's classes: ours, and theirs."""
    shared = {"num_classes": 5, "norm_eps": 1e-2, "norm_momentum": 0.3}
    if network == "efficientnet":
        rows = [FusedMBConvConfig(1, 3, 1, 8, 8, 2), FusedMBConvConfig(4, 3, 2, 8, 16, 3)]
        rows += [MBConvConfig(4, 3, 2, 16, 24, 1), MBConvConfig(6, 5, 1, 24, 16, 3), MBConvConfig(3, 5, 2, 16, 24, 2)]
        stages = table(
            "cn_r2_k3_s1_c8_skip",
            "er_r3_k3_s2_e4_c16",
            "ir_r1_k3_s2_e4_c24_se0.25",
            "ir_r3_k5_s1_e6_c16_se0.25",
            "ir_r2_k5_s2_e3_c24_se0.25",
        )
        config = MobileNetConfig(stages=stages, stem_width=8, top_width=40, activation="silu", **shared)
        norm = torchvision_norm(config)
        return config, EfficientNet(rows, 0.0, 0.0, num_classes=5, norm_layer=norm, last_channel=40)
    if network == "mobilenet_v2":
        config = replace(VARIANTS["mobilenet_v2"], dropout=0.0, **shared)
        config = replace(config, stages=scaled(config.stages, width=0.25), stem_width=8)
        return config, MobileNetV2(5, width_mult=0.25, norm_layer=torchvision_norm(config), dropout=0.0)
    if network == "mnasnet":
        config = VARIANTS["mnasnet1_0"]
        stages = scaled(config.stages, width=0.2)
        return replace(config, stages=stages, stem_width=8, dropout=0.0, num_classes=5), MNASNet(0.2, 5, dropout=0.0)
    config = replace(VARIANTS[network], dropout=0.0, **shared)
    return config, get_model(network, dropout=0.0, num_classes=5, norm_layer=torchvision_norm(config))


NETWORKS = {
    "efficientnet": _torchvision_efficientnet(5),
    "mobilenet_v2": TORCHVISION_V2,
    "mobilenet_v3_small": TORCHVISION_V3_SMALL,
    "mnasnet": TORCHVISION_MNASNET,
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_torchvisions_outputs_gradients_and_running_statistics(network, training):
    config, upstream = torchvision_pair(network)
    rules = NETWORKS[network]
    family = FAMILY._replace(upstreams={"torchvision": Upstream(rules)})
    assert_same_results((family, config), randomise(upstream, 0), images(), rules, training=training)


# All kinds of blocks and all options, in few networks: the table, our options, timm's for the same.
V1 = ("dsa_r1_k3_s1_c8", "dsa_r3_k3_s2_c16")
EDGE = ("cn_r3_k3_s1_c8_skip", "er_r3_k3_s2_e4_c16_se0.25 er_r1_k3_s1_e4_gs8_c16", "ir_r1_k5_s1_e3_c24_noskip")
MIXED = ("ds_r1_k3_s2_c8_se0.5", "ir_r1_k3.5.7_a1.1_p1.1_s2_e4_c24_se0.5_nsw ir_r3_k3.5_a1.1_s1_e3_c24")
V3 = ("ds_r1_k3_s1_c8_se0.25_nre", "ir_r1_k5_s2_e4_c16_se0.25 ir_r3_k3_s1_e2.3_c16_se0.25_nre", "cn_r1_k1_s1_c40")
V4 = (
    "er_r1_k3_s2_e4_c16",
    "uir_r3_a3_k5_s2_e4_c16 uir_r1_a0_k3_s1_e2_c16 mqa_r3_k3_h2_s1_v2_d8_c16 uir_r1_a5_k0_s1_e4_c16"
    " uir_r1_a0_k0_s1_e2_c16",
    "uir_r1_a3_k0_s2_e2_c24 mqa_r1_k3_h4_s1_d8_c24 cn_r1_k1_s1_c32",
)
DILATED = (
    "er_r1_k3_s2_e4_c8",
    "ir_r1_k3.5_s2_e4_c16",
    "ds_r2_k3.5_s2_c16 cn_r1_k3_s1_c16",
    "uir_r3_a3_k5_s2_e2_c16 mqa_r1_k3_h2_s1_v2_d8_c16 uir_r1_a3_k0_s1_e2_c16",
)
CASES: dict[str, tuple[tuple[str, ...], type, dict[str, Any], dict[str, Any]]] = {
    "without a top": (
        V1,
        TimmEfficientNet,
        {"top": "none", "activation": "relu6"},
        {"num_features": 0, "act_layer": "relu6"},
    ),
    "fused, as TensorFlow pads": (
        EDGE,
        TimmEfficientNet,
        {"padding": "same_tf", "norm_eps": 1e-2, "norm_momentum": 0.3, "activation": "silu", "stem_kernel": 5},
        {
            "pad_type": "same",
            "norm_layer": partial(torch.nn.BatchNorm2d, eps=1e-2, momentum=0.3),
            "act_layer": "silu",
            "stem_kernel_size": 5,
        },
    ),
    "mixed kernels, one channel, no head": (
        MIXED,
        TimmEfficientNet,
        {"in_channels": 1, "num_classes": 0, "padding": "same_tf"},
        {"in_chans": 1, "num_classes": 0, "pad_type": "same"},
    ),
    "V3": (
        V3,
        MobileNetV3,
        {
            "top": "pooled_bias",
            "activation": "hard_swish",
            "squeeze_of": "expanded",
            "squeeze_divisor": 8,
            "squeeze_activation": "relu",
            "squeeze_gate": "hard_sigmoid",
        },
        {
            "act_layer": "hard_swish",
            "se_layer": partial(
                SqueezeExcite,
                gate_layer="hard_sigmoid",
                force_act_layer=torch.nn.ReLU,
                rd_round_fn=round_channels,
            ),
        },
    ),
    "dilated": (DILATED, TimmEfficientNet, {"output_stride": 8}, {"output_stride": 8}),
    "V3 without a bias": (
        V3,
        MobileNetV3,
        {"top": "pooled", "squeeze_of": "expanded", "squeeze_gate": "hard_sigmoid"},
        {"head_bias": False, "se_layer": partial(SqueezeExcite, gate_layer="hard_sigmoid")},
    ),
    "V4": (
        V4,
        MobileNetV3,
        {"top": "pooled_norm", "layer_scale": 0.1, "activation": "gelu"},
        {"head_bias": False, "head_norm": True, "layer_scale_init_value": 0.1, "act_layer": "gelu"},
    ),
}


def timm_pair(case: str) -> tuple[MobileNetConfig, torch.nn.Module]:
    stages, network, ours, theirs = CASES[case]
    config = MobileNetConfig(**{"stages": table(*stages), "stem_width": 8, "top_width": 24, "num_classes": 5, **ours})
    theirs = {key: get_act_layer(value) if key == "act_layer" else value for key, value in theirs.items()}
    blocks = decode_arch_def([stage.split() for stage in stages])
    options = {"stem_size": 8, "num_features": 24, "num_classes": 5, **theirs}
    return config, randomise(network(blocks, **options), 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_timms_outputs_gradients_and_running_statistics(case, training):
    config, upstream = timm_pair(case)
    assert_same_results((only("timm"), config), upstream, images(config.in_channels), TIMM, training=training)


@pytest.mark.parametrize(
    "changes",
    [
        {"top": "pooled"},
        {"top": "none"},
        {"top_width": 32},
        {"stem_width": 16},
        {"stem_kernel": 7},
        {"in_channels": 1},
        {"num_classes": 0},
        {"squeeze_of": "expanded"},
        {"squeeze_divisor": 8},
        {"stages": table(*EDGE[:2], "ir_r1_k5_s1_e4_c24_noskip")},
        {"stages": table(*EDGE[:2], "ir_r2_k5_s1_e3_c24_noskip")},
        {"stages": table(*EDGE[:2], "ir_r1_k3_s1_e3_c24_noskip")},
    ],
    ids=str,
)
def test_every_option_changes_what_fits(changes):
    config, upstream = timm_pair("fused, as TensorFlow pads")
    with pytest.raises(CheckpointError, match="does not fit"):
        from_torch((only("timm"), replace(config, **changes)), upstream)


@pytest.mark.parametrize(
    "changes",
    [
        {"padding": "centred"},
        {"activation": "relu"},
        {"norm_eps": 1e-5},
        {"squeeze_activation": "relu"},
        {"squeeze_gate": "hard_sigmoid"},
        {"stages": table(*EDGE[:2], "ir_r1_k5_s2_e3_c24_noskip")},
        {"stages": table("cn_r3_k3_s1_c8", *EDGE[1:])},
    ],
    ids=str,
)
def test_every_other_option_changes_the_outputs(changes):
    assert_changes_the_outputs("fused, as TensorFlow pads", changes)


@pytest.mark.parametrize("changes", [{"output_stride": 16}, {"dilate_at_once": True}], ids=str)
def test_every_way_to_dilate_changes_the_outputs(changes):
    assert_changes_the_outputs("dilated", changes)


def assert_changes_the_outputs(case: str, changes: dict[str, Any]) -> None:
    config, upstream = timm_pair(case)
    outputs = []
    for each in (config, replace(config, **changes)):
        model, state = from_torch((only("timm"), each), upstream)
        outputs.append(eqx.filter_jit(eqx.filter_vmap(freeze(model, state)))(jnp.asarray(images())))
    assert jnp.abs(outputs[0] - outputs[1]).max() > 1e-3 * jnp.abs(outputs[0]).max()


def test_every_block_is_exported_where_it_came_from():
    config, upstream = timm_pair("V4")
    exported = unfill(_merge(*from_torch((only("timm"), config), upstream)), TIMM)
    state_dict = upstream.state_dict()
    assert exported.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert_close(exported[name], tensor, 1e-7)


def test_torchvision_takes_an_exported_mnasnet(tmp_path):
    upstream = randomise(get_model("mnasnet0_5"), 0)
    export(tmp_path / "x.pth", *from_torch("mnasnet0_5", upstream), format="torchvision")
    fresh = get_model("mnasnet0_5")
    fresh.load_state_dict(torch.load(tmp_path / "x.pth", weights_only=True))
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in upstream.state_dict().items())


def test_the_program_does_not_grow_with_repeats():
    sizes = set()
    for repeats in (3, 30):
        config = MobileNetConfig(stages=((Run("inverted", 8, repeats),), (Run("fused", 16, repeats, stride=2),)))
        make = partial(eqx.nn.make_with_state(MobileNet), config)
        call = lambda image: freeze(*make(key=jax.random.key(0)))(image)
        sizes.add(str(jax.make_jaxpr(jax.grad(lambda image: call(image).sum()))(jnp.zeros((32, 32, 3)))).count("= "))
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "dense"}, "kind='dense' is unknown; choose 'conv'"),
        ({"repeats": 0}, "repeats below 1"),
        ({"stride": 3}, "neither 1 nor 2"),
        ({"kind": "universal", "start_kernel": 0, "kernel": 0, "stride": 2}, "no filter to take its stride"),
        ({"kind": "universal"}, "start_kernel=1, which filters nothing"),
        ({"kind": "attention"}, "needs heads and dim_head"),
    ],
)
def test_a_run_that_can_not_be_is_refused(options, sentence):
    run = Run(**{"kind": "inverted", "channels": 8, **options})
    with pytest.raises(ValueError, match=sentence):
        MobileNetConfig(stages=((run,),))
