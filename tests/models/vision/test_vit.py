"""ViT is torchvision's and timm's: every variant's names, shapes and options; outputs and gradients of every option."""

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
from jaxtyping import Array
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torchvision.models import get_model, get_model_weights

from eqzoo._model import _skeleton, freeze
from eqzoo._save import _stored
from eqzoo.checkpoint import CheckpointError, unfill
from eqzoo.models.vision._vit_upstream import TIMM, TORCHVISION
from eqzoo.models.vision.vit import FAMILY, VARIANTS, ViT, ViTConfig
from eqzoo.tree import leaves_with_paths
from tests.parity import (
    assert_close,
    assert_names_and_shapes,
    assert_same_gradients,
    filled,
    from_torch,
    randomise,
)

TORCHVISION_VARIANTS = [name for name in VARIANTS if name.startswith(("vit_b_", "vit_l_", "vit_h_"))]
TIMM_VARIANTS = [name for name in VARIANTS if name not in TORCHVISION_VARIANTS]

# The modules that the mathematics of this family is made of. Anything else in an upstream model needs a look.
BLOCKS = {
    "Block": "prenorm",
    "ResPostBlock": "postnorm",
    "ParallelScalingBlock": "parallel",
    "DiffParallelScalingBlock": "parallel",
    "ParallelThingsBlock": "twin",
}
MLPS = {"Mlp": "mlp", "SwiGLU": "swiglu", "GluMlp": "swiglu_packed"}
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "SiLU": "silu"}
NORMS = {"LayerNorm": "layer", "RmsNorm": "rms"}
KNOWN = {
    *("VisionTransformer", "VisionTransformerDistilled", "PatchEmbed", "Attention", "DiffAttention", "LayerScale"),
    *("AttentionPoolLatent", "Linear", "Conv2d", "Identity", "Dropout", "Sequential", "ModuleList"),
    *(*BLOCKS, *MLPS, *ACTIVATIONS, *NORMS),
}


def is_there(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.nn.Identity)


def config_of(model: VisionTransformer) -> ViTConfig:
    """The config of a timm model, read off the model itself, but for the width of its MLPs."""
    block = model.blocks[0]
    kind = type(block).__name__
    attention = block.attns[0].attn if kind == "ParallelThingsBlock" else getattr(block, "attn", block)
    mlp = block.ffns[0].mlp if kind == "ParallelThingsBlock" else getattr(block, "mlp", None)
    scale = block.attns[0].ls if kind == "ParallelThingsBlock" else getattr(block, "ls1", getattr(block, "ls", None))
    final = [norm for norm in (model.norm, model.fc_norm) if is_there(norm)]
    weight_in, weight_out = (
        (attention.in_proj, attention.out_proj or attention.attn_out_proj)
        if mlp is None
        else (attention.qkv, attention.proj)
    )
    norm = next(module for module in block.modules() if type(module).__name__ in NORMS)
    return ViTConfig(
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=attention.num_heads,
        patch_size=model.patch_embed.patch_size[0],
        image_size=model.patch_embed.img_size[0],
        crop=model.patch_embed.img_size[0] % model.patch_embed.patch_size[0] != 0,
        in_channels=model.in_chans,
        block=BLOCKS[kind],
        attention="differential" if hasattr(attention, "sub_norm") else "softmax",
        mlp="mlp" if mlp is None else MLPS[type(mlp).__name__],
        class_token=model.has_class_token,
        distilled=isinstance(model, VisionTransformerDistilled),
        registers=model.num_reg_tokens,
        prefix_positions=not model.no_embed_class,
        pool=model.global_pool,
        pool_prefix=model.pool_include_prefix,
        norm=NORMS[type(norm).__name__],
        norm_eps=norm.eps,
        embed_norm=is_there(model.patch_embed.norm),
        pre_norm=is_there(model.norm_pre),
        qk_norm=is_there(attention.q_norm),
        attention_norm=is_there(getattr(attention, "norm", torch.nn.Identity())),
        mlp_norm=is_there(getattr(mlp, "norm", torch.nn.Identity())),
        final_norm=bool(final),
        fc_norm=is_there(model.fc_norm),
        layer_scale=getattr(block if kind == "ResPostBlock" else scale, "init_values", None),
        qkv_bias=weight_in.bias is not None,
        proj_bias=weight_out.bias is not None,
        activation=ACTIVATIONS[type(attention.mlp_act if mlp is None else mlp.act).__name__],
        num_classes=model.num_classes,
    )


@pytest.mark.parametrize("name", TIMM_VARIANTS)
def test_timm_variant_has_the_same_options_names_and_shapes(name):
    with torch.device("meta"):
        upstream = timm.create_model(name)
    ours, theirs = VARIANTS[name], config_of(upstream)
    assert replace(theirs, mlp_ratio=ours.mlp_ratio) == ours
    assert {type(module).__name__ for module in upstream.modules()} <= KNOWN
    inner = {id(module.sub_norm) for module in upstream.modules() if hasattr(module, "sub_norm")}
    norms = [module for module in upstream.modules() if type(module).__name__ in NORMS and id(module) not in inner]
    assert {norm.eps for norm in norms} == {ours.norm_eps}
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_variant_has_the_same_options_names_and_shapes(name):
    with torch.device("meta"):
        upstream = get_model(name)
    block = upstream.encoder.layers[0]
    assert VARIANTS[name] == ViTConfig(
        dim=upstream.hidden_dim,
        depth=len(upstream.encoder.layers),
        heads=block.num_heads,
        patch_size=upstream.patch_size,
        image_size=upstream.image_size,
        norm_eps=block.ln_1.eps,
        mlp_ratio=upstream.mlp_dim / upstream.hidden_dim,
    )
    assert_names_and_shapes((FAMILY, VARIANTS[name]), upstream.state_dict())


@pytest.mark.parametrize("name", TORCHVISION_VARIANTS)
def test_torchvision_publishes_the_same_number_of_parameters(name):
    published = {weights.meta["min_size"][0]: weights.meta["num_params"] for weights in get_model_weights(name)}
    for image_size, number in published.items():
        model, _ = _skeleton(partial(ViT, replace(VARIANTS[name], image_size=image_size)))
        assert number == sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct))
    assert VARIANTS[name].image_size in published


RMS = partial(timm.layers.RmsNorm, eps=0.1)

# Every option, in few models: ours, and timm's for the same.
OPTIONS = {
    "sizes": (
        {"heads": 2, "in_channels": 1, "mlp_ratio": 2.6, "depth": 1, "activation": "quick_gelu"},
        {"num_heads": 2, "in_chans": 1, "mlp_ratio": 2.6, "depth": 1, "act_layer": "quick_gelu"},
    ),
    "no class token": (
        {"class_token": False, "pool": "avg", "layer_scale": 1e-5, "qkv_bias": False},
        {"class_token": False, "global_pool": "avg", "fc_norm": False, "init_values": 1e-5, "qkv_bias": False},
    ),
    "registers": (
        {"registers": 2, "pool": "avg", "pre_norm": True, "activation": "gelu_tanh"},
        {"reg_tokens": 2, "global_pool": "avg", "fc_norm": False, "pre_norm": True, "act_layer": "gelu_tanh"},
    ),
    "registers without positions": (
        {"registers": 2, "prefix_positions": False, "class_token": False, "pool": "avg", "fc_norm": True},
        {"reg_tokens": 2, "no_embed_class": True, "class_token": False, "global_pool": "avg"},
    ),
    "class token without position": (
        {"prefix_positions": False, "fc_norm": True, "num_classes": 0},
        {"no_embed_class": True, "fc_norm": True, "num_classes": 0},
    ),
    "epsilon of every norm": (
        {"norm_eps": 0.1, "pre_norm": True, "qk_norm": True, "fc_norm": True},
        {"norm_layer": partial(torch.nn.LayerNorm, eps=0.1), "pre_norm": True, "qk_norm": True, "fc_norm": True},
    ),
    "distilled": ({"distilled": True}, {}),
    "attention pool": (
        {"class_token": False, "pool": "map", "registers": 1, "activation": "gelu_tanh", "mlp_ratio": 2.0},
        {"class_token": False, "global_pool": "map", "reg_tokens": 1, "act_layer": "gelu_tanh", "mlp_ratio": 2.0},
    ),
    "attention pool of all tokens": (
        {"pool": "map", "pool_prefix": True, "final_norm": False, "num_classes": 0, "image_size": 35, "crop": True},
        {"global_pool": "map", "pool_include_prefix": True, "final_norm": False, "num_classes": 0, "img_size": 35},
    ),
    "packed gates": (
        {"mlp": "swiglu_packed", "mlp_ratio": 5.5, "activation": "silu", "mlp_norm": True, "attention_norm": True},
        {"mlp_layer": timm.layers.SwiGLUPacked, "mlp_ratio": 5.5, "act_layer": "silu", "scale_mlp_norm": True}
        | {"scale_attn_norm": True},
    ),
    "gates, root mean squares and no biases": (
        {"mlp": "swiglu", "mlp_ratio": 2.7, "activation": "silu", "norm": "rms", "norm_eps": 0.1, "embed_norm": True}
        | {"qkv_bias": False, "proj_bias": False, "qk_norm": True},
        {"mlp_layer": timm.layers.SwiGLU, "mlp_ratio": 2.7, "act_layer": "silu", "norm_layer": RMS, "qk_norm": True}
        | {"embed_norm_layer": RMS, "qkv_bias": False, "proj_bias": False},
    ),
    "inner norms": (
        {"attention_norm": True, "mlp_norm": True, "norm_eps": 0.1},
        {"scale_attn_norm": True, "scale_mlp_norm": True, "norm_layer": partial(torch.nn.LayerNorm, eps=0.1)},
    ),
    "normalised last": (
        {"block": "postnorm", "layer_scale": 1e-5},
        {"block_fn": timm.models.vision_transformer.ResPostBlock, "init_values": 1e-5},
    ),
    "parallel": (
        {"block": "parallel", "layer_scale": 1e-5, "activation": "gelu_tanh"},
        {"block_fn": timm.models.vision_transformer.ParallelScalingBlock, "init_values": 1e-5}
        | {"act_layer": "gelu_tanh"},
    ),
    "parallel without biases": (
        {"block": "parallel", "qkv_bias": False, "qk_norm": True, "norm": "rms", "norm_eps": 0.1},
        {"block_fn": timm.models.vision_transformer.ParallelScalingBlock, "qkv_bias": False, "qk_norm": True}
        | {"norm_layer": RMS},
    ),
    "twins": (
        {"block": "twin", "layer_scale": 1e-5, "qk_norm": True},
        {"block_fn": timm.models.vision_transformer.ParallelThingsBlock, "init_values": 1e-5, "qk_norm": True},
    ),
    "differential": (
        {"attention": "differential", "qk_norm": True, "attention_norm": True, "depth": 3},
        {"attn_layer": "diff", "qk_norm": True, "scale_attn_norm": True, "depth": 3},
    ),
    "parallel and differential": (
        {"block": "parallel", "attention": "differential", "qk_norm": True, "depth": 3},
        {"block_fn": timm.models.vision_transformer.DiffParallelScalingBlock, "qk_norm": True, "depth": 3},
    ),
}


def tiny(**options: Any) -> ViTConfig:
    heads = 2 if options.get("attention") == "differential" else 3
    sizes = {"dim": 24, "depth": 2, "heads": heads, "patch_size": 8, "image_size": 32, "num_classes": 5}
    return ViTConfig(**{**sizes, **options})


def tiny_timm(ours: dict[str, Any], theirs: dict[str, Any]) -> torch.nn.Module:
    make = VisionTransformerDistilled if ours.get("distilled") else VisionTransformer
    heads = 2 if ours.get("attention") == "differential" else 3
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": heads, "patch_size": 8, "img_size": 32, "num_classes": 5}
    model = randomise(make(**{**sizes, **theirs}).eval(), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name:
                parameter.mul_(0.2)  # they add up to an exponent
    return model


def tiny_torchvision(config: ViTConfig) -> torch.nn.Module:
    model = torchvision.models.VisionTransformer(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.dim,
        mlp_dim=int(config.dim * config.mlp_ratio),
        num_classes=config.num_classes,
        norm_layer=partial(torch.nn.LayerNorm, eps=config.norm_eps),
    )
    return randomise(model.eval(), 0)


def frozen(config: ViTConfig, upstream: torch.nn.Module) -> Any:
    return freeze(*from_torch((FAMILY, config), upstream))


def images(config: ViTConfig, number: int = 2) -> np.ndarray:
    shape = (number, config.image_size, config.image_size, config.in_channels)
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


@eqx.filter_jit
def outputs(model: Any, x: Array) -> Array:
    return jax.vmap(model)(x)


@eqx.filter_jit
@partial(eqx.filter_grad, has_aux=True)
def gradients_and_outputs(model: Any, x: Array, labels: Array) -> tuple[Array, Array]:
    y = jax.vmap(model)(x)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], axis=1)), y


def assert_parity(config: ViTConfig, upstream: torch.nn.Module, rules: Any) -> None:
    x, labels = images(config), np.array([1, 3])
    theirs = upstream(channels_first(x))
    torch.nn.functional.cross_entropy(theirs, torch.from_numpy(labels)).backward()
    gradients, ours = gradients_and_outputs(frozen(config, upstream), jnp.asarray(x), jnp.asarray(labels))
    assert_close(ours, theirs, 1e-4)
    assert_same_gradients(gradients, upstream, rules, 1e-3)


def naming_of(config: ViTConfig) -> str:
    """How timm writes such a model down."""
    if config.block == "parallel":
        return "timm_parallel_differential" if config.attention == "differential" else "timm_parallel"
    return "timm_twin" if config.block == "twin" else "timm_gated" if config.mlp == "swiglu" else "timm"


@pytest.mark.parametrize("case", OPTIONS)
def test_outputs_and_gradients_are_those_of_timm(case):
    ours, theirs = OPTIONS[case]
    config = tiny(**ours)
    assert_parity(config, tiny_timm(ours, theirs), FAMILY.rules[naming_of(config)])


def test_outputs_and_gradients_are_those_of_torchvision():
    config = tiny(norm_eps=0.1, mlp_ratio=2.5)
    assert_parity(config, tiny_torchvision(config), TORCHVISION)


# Our options, timm's for the same, and whether a model without them notices by its outputs or already by its weights.
FORGOTTEN = {
    "heads": ({"heads": 2}, {"num_heads": 2}, AssertionError),
    "norm_eps": ({"norm_eps": 1e-3}, {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-3)}, AssertionError),
    "gelu_tanh": ({"activation": "gelu_tanh"}, {"act_layer": "gelu_tanh"}, AssertionError),
    "quick_gelu": ({"activation": "quick_gelu"}, {"act_layer": "quick_gelu"}, AssertionError),
    "pool": ({"pool": "avg"}, {"global_pool": "avg", "fc_norm": False}, AssertionError),
    "in_channels": ({"in_channels": 1}, {"in_chans": 1}, CheckpointError),
    "mlp_ratio": ({"mlp_ratio": 2.6}, {"mlp_ratio": 2.6}, CheckpointError),
    "depth": ({"depth": 3}, {"depth": 3}, CheckpointError),
    "class_token": (
        {"class_token": False, "pool": "avg"},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        CheckpointError,
    ),
    "registers": ({"registers": 2}, {"reg_tokens": 2}, CheckpointError),
    "prefix_positions": ({"prefix_positions": False}, {"no_embed_class": True}, CheckpointError),
    "fc_norm": ({"fc_norm": True}, {"fc_norm": True}, CheckpointError),
    "pre_norm": ({"pre_norm": True}, {"pre_norm": True}, CheckpointError),
    "qk_norm": ({"qk_norm": True}, {"qk_norm": True}, CheckpointError),
    "layer_scale": ({"layer_scale": 1e-5}, {"init_values": 1e-5}, CheckpointError),
    "qkv_bias": ({"qkv_bias": False}, {"qkv_bias": False}, CheckpointError),
    "num_classes": ({"num_classes": 0}, {"num_classes": 0}, CheckpointError),
    "distilled": ({"distilled": True}, {}, CheckpointError),
    "attention pool": (
        {"class_token": False, "pool": "map"},
        {"class_token": False, "global_pool": "map"},
        CheckpointError,
    ),
    "swiglu": ({"mlp": "swiglu"}, {"mlp_layer": timm.layers.SwiGLU}, CheckpointError),
    "swiglu_packed": ({"mlp": "swiglu_packed"}, {"mlp_layer": timm.layers.SwiGLUPacked}, CheckpointError),
    "norm": ({"norm": "rms"}, {"norm_layer": "rmsnorm"}, CheckpointError),
    "embed_norm": ({"embed_norm": True}, {"embed_norm_layer": "layernorm"}, CheckpointError),
    "attention_norm": ({"attention_norm": True}, {"scale_attn_norm": True}, CheckpointError),
    "mlp_norm": ({"mlp_norm": True}, {"scale_mlp_norm": True}, CheckpointError),
    "final_norm": ({"final_norm": False}, {"final_norm": False}, CheckpointError),
    "proj_bias": ({"proj_bias": False}, {"proj_bias": False}, CheckpointError),
    "silu": ({"activation": "silu"}, {"act_layer": "silu"}, AssertionError),
    "postnorm": (
        {"block": "postnorm"},
        {"block_fn": timm.models.vision_transformer.ResPostBlock},
        AssertionError,
    ),
}


@pytest.mark.parametrize("option", FORGOTTEN)
def test_a_forgotten_option_is_noticed(option):
    ours, theirs, error = FORGOTTEN[option]
    upstream = tiny_timm(ours, theirs)
    x = images(tiny(**ours))
    with pytest.raises(error):
        assert_close(outputs(frozen(tiny(), upstream), jnp.asarray(x)), upstream(channels_first(x)), 1e-4)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            {"registers": 2, "pre_norm": True, "qk_norm": True, "layer_scale": 1e-5},
            {"reg_tokens": 2, "pre_norm": True, "qk_norm": True, "init_values": 1e-5},
        ),
        (
            {"prefix_positions": False, "pool": "avg", "fc_norm": True, "qk_norm": True},
            {"no_embed_class": True, "global_pool": "avg", "qk_norm": True},
        ),
        ({"distilled": True, "qk_norm": True}, {"qk_norm": True}),
    ],
    ids=["registers", "averaged", "distilled"],
)
def test_every_weight_matters_to_the_output(ours, theirs):
    """So that a comparison of outputs would notice any one tensor in the wrong place."""
    config = tiny(**ours)
    arrays, static = eqx.partition(frozen(config, tiny_timm(ours, theirs)), eqx.is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    x = jnp.asarray(images(config))
    reference = np.asarray(outputs(eqx.combine(arrays, static), x))
    generator = np.random.default_rng(1)
    for index, (path, leaf) in enumerate(leaves_with_paths(arrays)):
        if path == "blocks[*].attention.key_norm.bias":
            continue  # it moves all scores of a query alike, which the softmax takes back
        moved = leaf + 0.1 * generator.normal(size=leaf.shape).astype(np.float32)
        changed = jax.tree.unflatten(treedef, [*leaves[:index], moved, *leaves[index + 1 :]])
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(outputs(eqx.combine(changed, static), x), reference, 1e-3)


def test_a_distilled_model_without_head_averages_its_two_tokens():
    config = tiny(distilled=True, num_classes=0)
    upstream = tiny_timm({"distilled": True}, {"num_classes": 0})
    x = images(config)
    assert_close(outputs(frozen(config, upstream), jnp.asarray(x)), upstream(channels_first(x)), 1e-4)


@pytest.mark.parametrize("name", ["vit_small_patch16_224", "vit_b_16"])
def test_a_whole_model_is_upstreams(name):
    with torch.device("meta"):
        upstream = timm.create_model(name) if name in TIMM_VARIANTS else get_model(name)
    upstream = randomise(upstream.to_empty(device="cpu").eval(), 0)
    x = images(VARIANTS[name], 1)
    with torch.no_grad():
        theirs = upstream(channels_first(x))
    assert_close(outputs(frozen(VARIANTS[name], upstream), jnp.asarray(x)), theirs, 1e-4)


def test_files_from_before_torchvision_renamed_the_mlp_load():
    config = tiny()
    upstream = tiny_torchvision(config)
    tensors = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): _stored(tensor.numpy())
        for name, tensor in upstream.state_dict().items()
    }
    assert any("linear_2" in name for name in tensors)
    old, _ = filled(tensors, _skeleton(partial(ViT, config)), FAMILY.rules)
    new, _ = from_torch((FAMILY, config), upstream)
    assert eqx.tree_equal(old, new)


def test_features_are_the_tokens_before_pooling():
    ours, theirs = OPTIONS["registers"]
    upstream = tiny_timm(ours, theirs)
    x = images(tiny(**ours), 1)
    model = frozen(tiny(**ours), upstream)
    (tokens,) = eqx.filter_jit(model.features)(jnp.asarray(x[0]))
    assert_close(tokens, upstream.forward_features(channels_first(x))[0], 1e-4)


def test_initial_weights_are_spread_as_in_timm():
    config = tiny(dim=192, depth=1, distilled=True, layer_scale=1e-5, num_classes=100)
    upstream = tiny_timm({"distilled": True}, {"embed_dim": 192, "depth": 1, "init_values": 1e-5, "num_classes": 100})
    upstream.init_weights()
    ours = unfill(eqx.filter_jit(ViT)(config, key=jax.random.key(0)), TIMM)
    for name, theirs in upstream.state_dict().items():
        if theirs.std() == 0:
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
        else:
            spread = 5 / np.sqrt(theirs.numel())  # five deviations of what two samples of this size differ by
            assert abs(ours[name].std() / theirs.std() - 1) < spread, name


@pytest.mark.parametrize("option", ["dropout", "attention_dropout", "drop_path"])
def test_training_needs_a_key_and_depends_on_it(option):
    config = tiny(**{option: 0.5})
    model, _ = from_torch((FAMILY, config), tiny_timm({}, {}))
    x = jnp.asarray(images(config)[0])
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 0, 4)])
    first, again, other = eqx.filter_jit(jax.vmap(lambda key: model(x, key=key)))(keys)
    assert jnp.array_equal(first, again)
    assert not jnp.allclose(first, other)
    with pytest.raises(ValueError, match="got no key in training mode"):
        eqx.filter_eval_shape(model, x)


def test_drop_path_grows_with_depth():
    """Of two blocks the first never drops a branch; the second drops each of its two by itself."""
    config = tiny(drop_path=0.5)
    model, _ = from_torch((FAMILY, config), tiny_timm({}, {}))
    x, keys = jnp.asarray(images(config)[0]), jax.random.split(jax.random.key(0), 32)
    run = eqx.filter_jit(lambda model: jax.vmap(lambda key: model(x, key=key))(keys))
    for silenced, outcomes in ((0, 4), (1, 1)):
        ends = lambda model: (model.blocks.block.attention.out, model.blocks.block.mlp.fc2)
        silence = lambda layer, silenced=silenced: jax.tree.map(lambda leaf: leaf.at[silenced].set(0), layer)
        ys = run(eqx.tree_at(ends, model, replace_fn=silence))
        assert len(np.unique(np.round(np.asarray(ys), 3), axis=0)) == outcomes


def test_inference_drops_nothing():
    config, upstream = tiny(dropout=0.5, attention_dropout=0.5, drop_path=0.5), tiny_timm({}, {})
    x = images(config)
    assert_close(outputs(frozen(config, upstream), jnp.asarray(x)), upstream(channels_first(x)), 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 33}, "image_size=33 is not a multiple of patch_size=8; the nearest below is 32"),
        ({"heads": 5}, "dim=24 is not a multiple of heads=5"),
        ({"class_token": False}, "pool='token' reads the class token, but class_token=False"),
        ({"layer_scale": 0.0}, "layer_scale=0 would silence every block"),
        ({"distilled": True, "registers": 4}, "distilled=True, but registers"),
        ({"distilled": True, "fc_norm": True}, "distilled=True, but registers"),
        ({"distilled": True, "prefix_positions": False}, "distilled=True, but registers"),
        ({"distilled": True, "pool": "avg"}, "distilled=True, but registers"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


@pytest.mark.parametrize("shape", [(48, 48, 3), (32, 32, 1), (3, 32, 32), (2, 32, 32, 3)])
def test_another_image_size_is_refused_in_one_sentence(shape):
    model, _ = _skeleton(partial(ViT, tiny()))
    with pytest.raises(
        TypeError, match=r"ViT: x is an array of shape .* expected a float array of shape \(32, 32, 3\)"
    ):
        model(jnp.zeros(shape))
