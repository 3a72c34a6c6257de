"""The contract battery's table: one row a family. And what the battery does with a row: make, train, compare."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod, sqrt
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import eqzoo
from eqzoo._model import _merge, _split
from eqzoo.models.vision._mobilenet_config import table
from eqzoo.tree import leaves_with_paths, map_with_path

BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """A family's class with a tiny config: every structural part, two layers or more in every stack, all rates above 0.

    `example` draws one input. `read_out` computes the output from what `features` (or `hidden`) returns, `after_head`
    from what the head returns. `vanishing` is a regex on the paths of leaves whose gradient is zero by symmetry or
    because only `logits_with_auxiliary` needs them, `replicated` on those of matrices that every device keeps a copy of
    on purpose.
    """

    model: type[Any]
    config: Any
    example: Callable[[PRNGKeyArray], Array]
    read_out: Callable[[Any, Any], Array]
    after_head: Callable[[Array], Array] = lambda logits: logits
    vanishing: str = ""
    replicated: str = ""

    @property
    def rates(self) -> tuple[str, ...]:
        """The config's fields that make training random."""
        return tuple(field.name for field in fields(self.config) if "drop" in field.name)

    def make(self, key: PRNGKeyArray, config: Any = None) -> tuple[Any, eqx.nn.State]:
        return eqx.nn.make_with_state(partial(self.model, self.config if config is None else config))(key=key)

    def skeleton(self, config: Any = None) -> tuple[Any, eqx.nn.State]:
        return eqx.filter_eval_shape(lambda: self.make(jax.random.key(0), config))

    def quiet(self) -> Any:
        """The config without randomness in training."""
        return replace(self.config, **dict.fromkeys(self.rates, 0.0))

    def batch(self, seed: int) -> Array:
        return jax.vmap(self.example)(jax.random.split(jax.random.key(seed), BATCH))


def _image(height: int, width: int, channels: int) -> Callable[[PRNGKeyArray], Array]:
    return lambda key: jax.random.normal(key, (height, width, channels), jnp.float32)


def _tokens(length: int, vocab: int) -> Callable[[PRNGKeyArray], Array]:
    return lambda key: jax.random.randint(key, (length,), 0, vocab, jnp.int32)


ROWS = (
    Row(
        model=eqzoo.MLP,
        config=eqzoo.MLPConfig(hidden=(16, 24), image_size=5, in_channels=3, norm=True, dropout=0.1, num_classes=8),
        example=_image(5, 5, 3),
        read_out=lambda model, features: model.head(features[-1]),
    ),
    Row(
        model=eqzoo.ResNet,
        config=eqzoo.ResNetConfig(
            block="bottleneck",
            depths=(1, 3),
            widths=(4, 8),
            cardinality=2,
            base_width=64,
            stem="deep",
            stem_width=4,
            shortcut="pool",
            attention="squeeze_excite",
            num_classes=8,
        ),
        example=_image(18, 26, 3),
        read_out=lambda model, features: model.head(jnp.mean(features[-1], axis=(0, 1))),
        replicated=r".*attention\.fc\d\.weight",
    ),
    Row(
        model=eqzoo.ViT,
        config=eqzoo.ViTConfig(
            dim=16,
            depth=3,
            heads=2,
            patch_size=4,
            image_size=12,
            registers=2,
            pre_norm=True,
            qk_norm=True,
            layer_scale=1e-5,
            dropout=0.1,
            attention_dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(12, 12, 3),
        read_out=lambda model, features: model.head(features[-1][0]),
        vanishing=r".*attention\.key_norm\.bias",  # it moves all scores of a query alike
        replicated=r"class_token|registers|positions",
    ),
    Row(
        model=eqzoo.GPT2,
        config=eqzoo.GPT2Config(dim=16, depth=3, heads=2, vocab=40, context=12, scale_by_layer=True),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: hidden @ model.embedding.weight.T,
        vanishing=r".*attention\.key\.bias",  # as above
    ),
    Row(
        model=eqzoo.GPTNeoX,
        config=eqzoo.GPTNeoXConfig(
            dim=16,
            depth=3,
            heads=2,
            hidden=24,
            vocab=40,
            rotary=eqzoo.nn.Rotary(partial=0.5),
            attention_dropout=0.1,
            residual_dropout=0.1,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.head(hidden),
    ),
    Row(
        model=eqzoo.RNN,
        config=eqzoo.RNNConfig(dim=12, depth=3, hidden=16, vocab=40, dropout=0.1),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.head(hidden),
    ),
    Row(
        model=eqzoo.Mamba,
        config=eqzoo.MambaConfig(
            dim=16, depth=3, expand=1, state=3, kernel=3, time_step_rank=2, vocab=40, use_bias=True, tied_head=False
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.head(hidden),
    ),
    Row(
        model=eqzoo.Mamba2,
        config=eqzoo.Mamba2Config(
            dim=32, depth=2, dim_head=8, groups=2, state=8, kernel=3, vocab=40, use_bias=True, tied_head=False
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.head(hidden),
    ),
    Row(
        model=eqzoo.Llama,
        config=eqzoo.LlamaConfig(
            dim=16,
            depth=3,
            heads=4,
            hidden=24,
            vocab=40,
            context=12,
            kv_heads=2,
            window=4,
            attention_bias="all",
            mlp_bias=True,
            qk_norm="head",
            embedding_scale=2.0,
            residual_scale=0.5,
            attention_dropout=0.1,
            residual_dropout=0.1,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.logits(hidden),
    ),
    Row(
        model=eqzoo.Bert,
        config=eqzoo.BertConfig(
            dim=16, depth=3, heads=2, hidden=24, vocab=40, context=12, head="classifier", num_classes=8
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.logits(hidden),
        vanishing=r".*attention\.key\.bias",  # as above
    ),
    Row(
        model=eqzoo.ModernBert,
        config=eqzoo.ModernBertConfig(
            dim=16,
            depth=4,
            heads=2,
            hidden=24,
            vocab=40,
            window=6,
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            head_bias=True,
            head="classifier",
            embedding_dropout=0.1,
            attention_dropout=0.1,
            mlp_dropout=0.1,
            head_dropout=0.1,
            num_classes=8,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.logits(hidden),
    ),
    Row(
        model=eqzoo.Gemma,
        config=eqzoo.GemmaConfig(
            dim=16,
            depth=3,
            heads=4,
            kv_heads=2,
            hidden=24,
            dim_head=4,
            vocab=40,
            pattern=("local", "global"),
            window=3,
            local_rotary=eqzoo.nn.Rotary(base=50.0),
            attention_cap=5.0,
            final_cap=10.0,
            post_norms=True,
            qk_norm=True,
            attention_dropout=0.1,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.logits(hidden),
    ),
    Row(
        model=eqzoo.Mixtral,
        config=eqzoo.MixtralConfig(
            dim=16,
            depth=3,
            heads=4,
            kv_heads=2,
            hidden=24,
            experts=3,
            top_k=3,  # all of them, for weights that are rounded would choose others
            vocab=40,
            window=4,
            qk_norm=True,
            attention_dropout=0.1,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.head(hidden),
    ),
    Row(
        model=eqzoo.T5,
        config=eqzoo.T5Config(
            dim=16,
            depth=3,
            decoder_depth=2,
            heads=2,
            hidden=24,
            dim_head=4,
            vocab=40,
            buckets=8,
            max_distance=6,
            gated=True,
            activation="gelu_tanh",
            tied_head=False,
        ),
        example=_tokens(10, 40),
        read_out=lambda model, hidden: model.logits(hidden),
        vanishing=r"decoder\.positions|decoder\..*\.attention\.(query|key)\.weight",  # the answer is one token
        replicated=r"(en|de)coder\.positions",
    ),
    Row(
        model=eqzoo.ConvNeXt,
        config=eqzoo.ConvNeXtConfig(
            depths=(2, 3),
            widths=(8, 12),
            kernel_sizes=(3, 5),
            stem="overlap_act",
            norm="simple",
            response_norm=True,
            layer_scale=1e-6,
            conv_mlp=True,
            head_hidden=10,
            dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(17, 23, 3),
        read_out=lambda model, features: model.head(
            eqzoo.nn.gelu(model.hidden(model.norm(jnp.mean(features[-1], axis=(0, 1)))))
        ),
    ),
    Row(
        model=eqzoo.Mixer,
        config=eqzoo.MixerConfig(
            dim=16,
            depth=3,
            patch_size=4,
            image_size=12,
            mlp_ratio=(0.5, 2.0),
            gated=True,
            activation="silu",
            stem_norm=True,
            mlp_dropout=0.1,
            dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(12, 12, 3),
        read_out=lambda model, features: model.head(jnp.mean(features[-1], axis=0)),
    ),
    Row(
        model=eqzoo.Swin,
        config=eqzoo.SwinConfig(
            version=2,
            dim=8,
            depths=(2, 3),
            heads=(2, 2),
            windows=(3, 3),
            pretrained_windows=(2, 0),
            patch_size=2,
            image_size=16,
            dropout=0.1,
            attention_dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(16, 14, 3),
        read_out=lambda model, features: model.head(jnp.mean(model.norm(features[-1]), axis=(0, 1))),
        replicated=r".*\.bias\.fc\d\.weight",
    ),
    Row(
        model=eqzoo.MaxViT,
        config=eqzoo.MaxViTConfig(
            depths=(3,),
            widths=(8,),
            stem_width=4,
            dim_head=4,
            window=2,
            mlp_ratio=2,
            dropout=0.1,
            attention_dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(16, 16, 3),
        read_out=lambda model, features: model.head(
            jnp.tanh(model.pre_head(model.norm(jnp.mean(features[-1], axis=(0, 1)))))
        ),
        vanishing=r".*attention\.key\.bias|.*mbconv\.norm\.bias",  # as above; the next batch norm takes it off
        replicated=r".*\.bias\.table",
    ),
    Row(
        model=eqzoo.RegNet,
        config=eqzoo.RegNetConfig(
            depths=(1, 3),
            widths=(8, 12),
            group_size=8,
            bottleneck=2.0,
            squeeze_excite=0.25,
            shortcut="pool",
            linear_out=True,
            activation="silu",
            stem_width=8,
            last_width=16,
            dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(10, 14, 3),
        read_out=lambda model, features: model.head(jnp.mean(model.last(features[-1]), axis=(0, 1))),
        vanishing=r".*(layers\.3|pooled_shortcut)\.norm\.bias",  # the next batch norm takes it off
        replicated=r".*layers\.\d\.fc\d\.weight",  # squeeze-and-excitation
    ),
    Row(
        model=eqzoo.DenseNet,
        config=eqzoo.DenseNetConfig(
            growth_rate=8,
            layers=(1, 2),
            bottleneck=2,
            stem="deep",
            blur=True,
            layer_dropout=0.1,
            dropout=0.1,
            num_classes=8,
        ),
        example=_image(18, 26, 3),
        read_out=lambda model, features: model.head(jnp.mean(features[-1], axis=(0, 1))),
    ),
    Row(
        model=eqzoo.ShuffleNetV2,
        config=eqzoo.ShuffleNetV2Config(depths=(1, 3), widths=(8, 16), stem_width=8, last_width=24, num_classes=8),
        example=_image(18, 26, 3),
        read_out=lambda model, features: model.head(jnp.mean(model.last(features[-1]), axis=(0, 1))),
        vanishing=r".*(left\.0|right\.1)\.norm\.bias",  # the next batch norm takes it off
    ),
    Row(
        model=eqzoo.VGG,
        config=eqzoo.VGGConfig(widths=((8,), (12, 12)), norm=True, hidden=16, pool="after", dropout=0.1, num_classes=8),
        example=_image(18, 34, 3),
        read_out=lambda model, features: model.head(model.embedding(features[-1])),
        vanishing=r"layers\.[047]\.bias",  # batch norm takes it off again
    ),
    Row(
        model=eqzoo.AlexNet,
        config=eqzoo.AlexNetConfig(widths=(8, 12, 8, 12, 8), hidden=16, dropout=0.1, num_classes=8),
        example=_image(63, 71, 3),
        read_out=lambda model, features: model.head(model.embedding(features[-1])),
    ),
    Row(
        model=eqzoo.SqueezeNet,
        config=eqzoo.SqueezeNetConfig(stem_width=8, stem_kernel=3, squeeze=((2, 3), (2,)), dropout=0.1, num_classes=8),
        example=_image(9, 9, 3),  # which leaves one position, so that there is one embedding
        read_out=lambda model, features: jnp.mean(jax.nn.relu(model.head(features[-1])), axis=(0, 1)),
        after_head=jax.nn.relu,
    ),
    Row(
        model=eqzoo.GoogLeNet,
        config=eqzoo.GoogLeNetConfig(
            stem=(8, 8, 8),
            blocks=(((8, 8, 8, 8, 8, 8),), ((8, 8, 8, 8, 8, 8), (8, 8, 8, 8, 8, 16)), ((8, 8, 8, 8, 8, 8),)),
            transform_input=True,
            aux_heads=True,
            aux=(8, 16),
            dropout=0.1,
            aux_dropout=0.1,
            num_classes=8,
        ),
        example=_image(65, 81, 3),
        read_out=lambda model, features: model.head(jnp.mean(features[-1], axis=(0, 1))),
        vanishing=r"aux_heads\..*",
    ),
    Row(
        model=eqzoo.InceptionV3,
        config=eqzoo.InceptionV3Config(
            pool_widths=(64,),
            widths_7x7=(128,),
            wide_blocks=1,
            width=1 / 16,
            transform_input=True,
            aux_heads=False,  # it takes images of 299 pixels; GoogLeNet has some
            dropout=0.1,
            num_classes=8,
        ),
        example=_image(107, 123, 3),
        read_out=lambda model, features: model.head(jnp.mean(features[-1], axis=(0, 1))),
    ),
    Row(
        model=eqzoo.Eva,
        config=eqzoo.EvaConfig(
            dim=16,
            depth=3,
            heads=2,
            patch_size=4,
            image_size=12,
            mlp="swiglu",
            registers=1,
            rotary="grid",
            rotary_grid=4,
            pool="map",
            pre_norm=True,
            attention_norm=True,
            mlp_norm=True,
            final_norm=True,
            layer_scale=1e-5,
            dropout=0.1,
            attention_dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(12, 12, 3),
        read_out=lambda model, features: model.head(model.fc_norm(model.attention_pool(features[-1]))),
        vanishing=r"attention_pool\.key\.bias",  # it moves all scores of a query alike
        replicated=r"class_token|registers|positions|attention_pool\.latent\.weight",
    ),
    Row(
        model=eqzoo.MobileNet,
        config=eqzoo.MobileNetConfig(
            stages=table(
                "cn_r1_k3_s1_c8_skip er_r1_k3_s1_e2_c8",
                "ds_r1_k3_s2_c8 ir_r3_k3.5_a1.1_s1_e2_c8_se0.25",
                "uir_r1_a3_k3_s1_e2_c12 mqa_r1_k3_h2_s1_v2_d4_c12",
            ),
            stem_width=8,
            top_width=24,
            activation="silu",
            padding="same_tf",
            layer_scale=1e-5,
            dropout=0.1,
            drop_path=0.1,
            num_classes=8,
        ),
        example=_image(17, 22, 3),
        read_out=lambda model, features: model.head(model.pooled(features[-1])),
        vanishing=r".*(dw_start|2\.0\.first\.pw_proj|key_down)\.norm\.bias",  # the next batch norm takes it off
        replicated=r".*squeeze_excite\.fc\d\.weight",
    ),
    Row(
        model=eqzoo.Segmenter,
        config=eqzoo.SegmenterConfig(
            backbone="test_convnext",
            decoder="aspp",
            output_stride=32,
            aux_head=True,
            dropout=0.1,
            pyramid_dropout=0.1,
            num_classes=8,
        ),
        example=_image(40, 64, 3),
        read_out=lambda model, features: eqzoo.nn.resize_bilinear(model.head(features[-1]), (40, 64)),
        # the main logits don't need it; or the next batch norm takes it off, for dilations are larger than the map
        vanishing=r"aux_.*|backbone\.norm\.(weight|bias)|backbone\.stages\.3\.blocks\[\*\]\.fc2\.bias",
    ),
    Row(
        model=eqzoo.UNet,
        config=eqzoo.UNetConfig(backbone="test_efficientnet", widths=(16, 8, 8, 8, 8), num_classes=8),
        example=_image(37, 50, 3),
        read_out=lambda model, features: model.head(features[-1]),
    ),
)

# A family of each kind: of plain layers, with running statistics, of stacked blocks, and of text.
KINDS = tuple(row for row in ROWS if row.model in (eqzoo.MLP, eqzoo.ResNet, eqzoo.ViT, eqzoo.GPT2))


def randomised(row: Row, seed: int) -> tuple[Any, eqx.nn.State]:
    """Model and state with nothing zero, nothing symmetric, nothing as initialised: every number matters."""
    model, state = row.skeleton()
    generator = np.random.default_rng(seed)

    def draw(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        noise = generator.standard_normal(leaf.shape)
        fan_in = prod(leaf.shape[path.count("[*]") + 1 :])
        if path.endswith("running.count"):
            noise = np.full(leaf.shape, 7)
        elif path.endswith("running.var"):
            noise = 0.5 + np.abs(noise)
        elif fan_in > 1:
            noise = noise / sqrt(fan_in) if path.endswith("weight") else 0.5 * noise
        else:
            noise = 0.3 * noise + path.endswith("weight")
        return jnp.asarray(noise, leaf.dtype)

    return _split(map_with_path(draw, _merge(model, state)), model, state)


def train(model: Any, state: eqx.nn.State, xs: Array, keys: PRNGKeyArray) -> tuple[Array, eqx.nn.State]:
    """The outputs for a batch in training mode, and the new statistics."""
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, for Equinox voids what it passes on
    call = lambda x, key: eqzoo.apply(model, state, x, key=key)
    return jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs, keys)


def error(ys: Float[Array, "..."]) -> Float[Array, ""]:
    """A loss that depends on every output in its own way."""
    return jnp.mean((ys - jnp.cos(jnp.arange(ys.size)).reshape(ys.shape)) ** 2)


def train_step(model: Any, state: eqx.nn.State, xs: Array, keys: PRNGKeyArray) -> tuple[Array, eqx.nn.State, PyTree]:
    """Outputs, new statistics and gradients."""

    def loss(model):
        ys, new_state = train(model, state, xs, keys)
        return error(ys), (ys, new_state)

    gradients, (ys, new_state) = eqx.filter_grad(loss, has_aux=True)(model)
    return ys, new_state, gradients


jitted_train = eqx.filter_jit(train)
jitted_train_step = eqx.filter_jit(train_step)


def cast(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if eqx.is_inexact_array(leaf) else leaf, tree)


def assert_close(ours: PyTree, expected: PyTree, tolerance: float) -> None:
    """Leaf by leaf: the largest error relative to the leaf's largest number.

    A leaf that should vanish (a gradient, by symmetry) is measured against a thousandth of the tree's largest number.
    """
    named = [(path, np.asarray(leaf)) for path, leaf in leaves_with_paths(expected) if eqx.is_array_like(leaf)]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(ours) if eqx.is_array_like(leaf)]
    largest = max(np.abs(leaf).max() for _, leaf in named)
    for (path, theirs), leaf in zip(named, leaves, strict=True):
        assert leaf.shape == theirs.shape, path
        assert np.isfinite(leaf).all(), f"{path} is not finite"
        scale = max(np.abs(theirs).max(), 1e-3 * largest) or 1.0  # all zeros: what a head of zeros puts out
        error = np.abs(leaf.astype(float) - theirs.astype(float)).max() / scale
        assert error <= tolerance, f"{path or 'the output'}: relative error {error:.2e}, above {tolerance:.0e}"


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(pattern, path) is not None
