"""What decays, what learns at which rate, what learns at all, and how optax then moves the leaves."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, PyTree

import eqzoo
from eqzoo import nn
from eqzoo.tree.masks import decay_mask, freeze, labels, layer_scales, trainable
from eqzoo.tree.paths import leaves_with_paths, map_with_path
from tests.contract.table import KINDS, error, jitted_train_step, randomised

MODELS = {row.model.__name__: row for row in KINDS}


def ensemble(tree: PyTree, members: int = 2) -> PyTree:
    """The tree as `eqx.filter_vmap` of its constructor would make it: each array with one more axis in front."""
    return jax.tree.map(lambda leaf: np.stack([leaf] * members) if eqx.is_array(leaf) else leaf, tree)


def decayed(tree: PyTree) -> set[str]:
    return {path for path, chosen in leaves_with_paths(decay_mask(tree)) if chosen}


def test_what_decays_in_gpt2_is_its_matrices():
    row = MODELS["GPT2"]
    layers = ("attention.query", "attention.key", "attention.value", "attention.out", "mlp.fc1", "mlp.fc2")
    expected = {"embedding.weight", *(f"blocks[*].{layer}.weight" for layer in layers)}
    assert decayed(row.skeleton()[0]) == expected


def test_what_decays_in_trees_without_modules():
    layer = {"W": jnp.ones((4, 3)), "b": jnp.ones(4)}
    for tree in ([layer, layer], ensemble([layer, layer]), ensemble(ensemble([layer, layer]))):
        assert decay_mask(tree) == [{"W": True, "b": False}] * 2
    assert decay_mask((jnp.ones((2, 2)), jnp.ones(2), 3.0)) == (True, False, False)
    assert decay_mask(jnp.ones((2, 2))) is True


@pytest.mark.parametrize(
    "name",
    [
        *("b", "b1", "b_2", "b_out", "bias", "biases", "bias_n", "qkv_bias", "in_proj_bias", "bias_0", "body.b"),
        *("scale", "logit_scale", "gamma", "gamma_1", "beta", "norm.scale"),
        *("cls_token", "class_token", "mask_token", "tokens", "registers", "reg_token", "register_tokens"),
        *("pos", "positions", "pos_embed", "absolute_pos_embed", "encoder.pos_embedding", "positional_embedding"),
        *("position_embeddings", "position_embedding.weight", "transformer.wpe.weight", "rel_pos_h", "W_pos"),
        *("mixer.A_log", "layers.0.mixer.dt_bias"),
        *("relative_position_bias_table", "relative_attention_bias.weight", "rel_pos_bias", "relative_position_bias.0"),
    ],
)
def test_what_these_names_mean_never_decays(name):
    assert decay_mask({name: jnp.ones((3, 4))}) == {name: False}


@pytest.mark.parametrize(
    "name",
    [
        *("W", "w1", "kernel", "weight", "weight_hh", "down", "up", "embedding", "wte.weight", "0"),
        *("mlp_tokens.weight", "token_embedding.weight", "scale.weight", "position_mlp.fc1.weight", "pos_proj.weight"),
        *("bias_proj.weight", "b.weight", "biased.kernel", "scaled", "expose", "position.fc.kernel", "gamma.kernel"),
    ],
)
def test_a_matrix_of_another_name_decays(name):
    assert decay_mask({name: jnp.ones((3, 4))}) == {name: True}


def test_a_vector_of_any_name_does_not_decay_in_a_stack_or_a_stack_of_stacks():
    class Gate(eqx.Module):
        strength: Array
        mix: Array

    gates = nn.Stack(lambda key: Gate(jnp.ones(3), jnp.ones((3, 3))), 2, key=jax.random.key(0))
    assert decayed(gates) == {"[*].mix"}
    assert decayed([nn.Stack(lambda key: gates, 4, key=jax.random.key(0))]) == {"0[*][*].mix"}


def test_a_list_of_biases_does_not_decay():
    assert decay_mask({"biases": [jnp.ones((2, 3))], "weights": [jnp.ones((2, 3))]}) == {
        "biases": [False],
        "weights": [True],
    }


class Zoo(eqx.Module):
    """A module of each kind that Equinox has, with numbers that are no matrix."""

    layers: tuple[Any, ...]

    def __init__(self, key):
        self.layers = (
            eqx.nn.Conv2d(2, 3, 3, key=key),
            eqx.nn.ConvTranspose1d(2, 3, 3, key=key),
            eqx.nn.GRUCell(2, 3, key=key),
            eqx.nn.LSTMCell(2, 3, key=key),
            eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=key),
            eqx.nn.Embedding(5, 3, key=key),
            eqx.nn.MLP(2, 2, 3, 1, key=key),
            eqx.nn.LayerNorm((2, 3, 4)),
            eqx.nn.GroupNorm(2, 4),
            eqx.nn.RMSNorm((2, 3)),
            eqx.nn.BatchNorm(3, "batch", mode="batch"),
            eqx.nn.PReLU(),
            eqx.nn.Dropout(0.5),
            nn.GroupNorm(1, 2),
            nn.RMSNorm(2),
        )


def test_what_decays_in_equinox_layers_alone_and_in_an_ensemble():
    model, _ = eqx.nn.make_with_state(Zoo)(jax.random.key(0))
    layer = lambda index, *names: {f"layers.{index}.{name}" for name in names}
    expected = {
        *layer(0, "weight"),
        *layer(1, "weight"),
        *layer(2, "weight_ih", "weight_hh"),
        *layer(3, "weight_ih", "weight_hh"),
        *layer(4, *(f"{name}_proj.weight" for name in ("query", "key", "value", "output"))),
        *layer(5, "weight"),
        *layer(6, "layers.0.weight", "layers.1.weight"),
    }
    assert decayed(model) == decayed(ensemble(model)) == decayed(ensemble(ensemble(model))) == expected


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_of_an_ensemble_a_skeleton_and_traced_arrays_is_that_of_the_model(name):
    model, _ = randomised(MODELS[name], 0)
    mask = decay_mask(model)
    assert jax.tree.structure(mask) == jax.tree.structure(model)
    assert {type(leaf) for leaf in jax.tree.leaves(mask)} == {bool}
    assert eqx.tree_equal(decay_mask(ensemble(model)), mask)
    assert eqx.tree_equal(decay_mask(MODELS[name].skeleton()[0]), mask)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    traced = []
    jax.eval_shape(lambda parameters: traced.append(decay_mask(parameters)), parameters)
    assert jax.tree.leaves(traced[0]) == jax.tree.leaves(decay_mask(parameters))
    assert decayed(parameters) == decayed(model)


def test_what_is_no_float_does_not_decay():
    tree = {"count": jnp.ones((2, 2), int), "flags": jnp.ones((2, 2), bool), "W": jnp.ones((2, 2), jnp.bfloat16)}
    tree |= {"key": jax.random.split(jax.random.key(0), (2, 2)), "f": jax.nn.relu, "none": None}
    assert decay_mask(tree) == {**dict.fromkeys(tree, False), "W": True, "none": None}


@eqx.filter_jit
def first_updates(optimizer: optax.GradientTransformation, gradients: PyTree, parameters: PyTree) -> PyTree:
    return optimizer.update(gradients, optimizer.init(parameters), parameters)[0]


@pytest.mark.parametrize("name", MODELS)
def test_adamw_shrinks_what_decays_and_nothing_else(name):
    model, _ = randomised(MODELS[name], 0)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    optimizer = optax.adamw(0.5, weight_decay=0.1, mask=decay_mask)

    updates = first_updates(optimizer, jax.tree.map(jnp.zeros_like, parameters), parameters)
    after, mask = eqx.apply_updates(parameters, updates), decay_mask(parameters)
    for old, new, chosen in zip(*map(jax.tree.leaves, (parameters, after, mask)), strict=True):
        np.testing.assert_allclose(new, old * 0.95 if chosen else old, rtol=1e-6 if chosen else 0)


def batch_and_keys(row) -> tuple[Array, Array]:
    xs = row.batch(1)
    return xs, jax.random.split(jax.random.key(2), len(xs))


@pytest.mark.parametrize(
    ("name", "body"), [("ResNet", ("stages", "stem")), ("ViT", (nn.LayerNorm, "*.attention.*.weight"))]
)
def test_each_label_has_its_own_optimizer(name, body):
    model, state = randomised(MODELS[name], 0)
    *_, gradients = jitted_train_step(model, state, *batch_and_keys(MODELS[name]))
    groups = labels(model, {"head": "head", "body": body, "rest": "*"})
    assert set(jax.tree.leaves(groups)) == {"head", "body", "rest"} - ({"rest"} if name == "ResNet" else set())
    parameters = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(groups) == jax.tree.structure(parameters)
    optimizer = optax.multi_transform(
        {"head": optax.sgd(2.0), "body": optax.sgd(0.25), "rest": optax.set_to_zero()},
        lambda params: groups,
    )
    updates = first_updates(optimizer, gradients, parameters)
    rates = {"head": 2.0, "body": 0.25, "rest": 0.0}
    for update, gradient, label in zip(*map(jax.tree.leaves, (updates, gradients, groups)), strict=True):
        np.testing.assert_array_equal(update, -rates[label] * gradient)
    for path, label in leaves_with_paths(groups):
        is_body = (
            "norm" in path or (".attention." in path and path.endswith("weight"))
            if name == "ViT"
            else path.startswith("st")
        )
        assert label == ("head" if path.startswith("head") else "body" if is_body else "rest"), path


def test_decay_masks_work_within_labels():
    model, _ = randomised(MODELS["ViT"], 0)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    adamw = optax.adamw(0.5, weight_decay=0.1, mask=decay_mask)
    find = lambda params: labels(params, {"a": "head", "b": "*"})
    optimizer = optax.multi_transform({"a": adamw, "b": optax.set_to_zero()}, find)
    updates = first_updates(optimizer, jax.tree.map(jnp.zeros_like, parameters), parameters)
    assert [path for path, update in leaves_with_paths(updates) if jnp.any(update != 0)] == ["head.weight"]


def test_the_first_rule_that_selects_a_leaf_counts():
    tree = {"a": jnp.ones(1), "b": jnp.ones(1), "c": jnp.ones(1)}
    assert labels(tree, {"x": "a", "y": ("a", "b"), "z": "*"}) == {"a": "x", "b": "y", "c": "z"}
    assert labels(tree, {"z": "*", "x": "a"}) == dict.fromkeys("abc", "z")


def test_labels_and_scales_are_none_where_an_optimizer_has_nothing_to_move():
    tree = [{"W": jnp.ones(1), "n": jnp.ones(1, int), "flag": True, "f": jax.nn.relu, "dropout": eqx.nn.Dropout(0.5)}]
    expected = jax.tree.structure(eqx.filter(tree, eqx.is_inexact_array))
    assert jax.tree.structure(labels(tree, {"rest": "*"})) == expected
    assert jax.tree.structure(layer_scales(tree, 0.5)) == expected


def test_a_float_without_a_label_is_an_error_that_names_it():
    tree = [jnp.ones(1)] * 5 + [jnp.ones(1, int)]
    with pytest.raises(ValueError, match=r'^labels: no rule selects 1, 2, 3 and 1 more; end .*: \{"rest": "\*"\}$'):
        labels(tree, {"first": "0"})
    with pytest.raises(ValueError, match=r"^labels: no rule selects 2; end"):
        labels(tree, {"first": ("0", "1", "3", "4")})
    with pytest.raises(ValueError, match=r"select: .*'haed'"):
        labels(tree, {"first": "haed", "rest": "*"})


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_scaled_by_layer(name):
    model, state = randomised(MODELS[name], 0)
    *_, gradients = jitted_train_step(model, state, *batch_and_keys(MODELS[name]))
    parameters = eqx.filter(model, eqx.is_inexact_array)
    scales = layer_scales(model, 0.5)
    scale_by_layer = optax.stateless(lambda updates, params: jax.tree.map(lambda u, s: u * s, updates, scales))
    plain = optax.adamw(1e-3, mask=decay_mask)
    scaled = optax.chain(plain, scale_by_layer)

    update = lambda optimizer: first_updates(optimizer, gradients, parameters)
    last = 4 if name != "MLP" else 2
    numbers = {"stem": 0, "patch_embed": 0, "class_token": 0, "registers": 0, "positions": 0, "pre_norm": 0}
    numbers |= {"embedding": 0, "stages.0.first": 1, "stages.1.first": 2, "layers.0": 0, "layers.1": 1}
    if name == "GPT2":  # its head is the embedding, so the last layer is the last block
        last = 3
    if name == "ResNet":
        last = 5
    for path, (ours, theirs, scale) in zip(
        [path for path, _ in leaves_with_paths(parameters)],
        zip(*map(jax.tree.leaves, (update(scaled), update(plain), scales)), strict=True),
        strict=True,
    ):
        if "[*]" in path:
            begin = 3 if name == "ResNet" else 1
            layers = np.arange(begin, begin + len(ours)).reshape(-1, *[1] * (ours.ndim - 1))
            assert scale.dtype == np.float32
            assert scale.shape == layers.shape
        elif path.startswith("norm"):
            layers = 3
        else:
            layers = next((number for part, number in numbers.items() if path.startswith(part)), last)
            assert isinstance(scale, float)
        np.testing.assert_allclose(ours, theirs * 0.5 ** (last - layers), rtol=1e-6, err_msg=path)


def test_scales_keep_a_plain_leafs_dtype():
    tree = [jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)]
    scaled = jax.tree.map(lambda leaf, scale: leaf * scale, tree, layer_scales(tree, 0.5))
    assert scaled[0].dtype == jnp.bfloat16


def test_layers_of_lists_and_of_equinox_modules():
    pair = (jnp.ones((2, 2)), jnp.ones(2))
    assert layer_scales([pair, pair, pair], 0.5) == [(0.25, 0.25), (0.5, 0.5), (1.0, 1.0)]
    assert layer_scales(({"W": jnp.ones(1)}, jnp.ones(1)), 0.5) == ({"W": 0.5}, 1.0)
    key = jax.random.key(0)
    scales = layer_scales(eqx.nn.MLP(2, 2, 2, 2, key=key), 0.5)
    assert [layer.weight for layer in scales.layers] == [0.25, 0.5, 1.0]
    linear = eqx.nn.Linear(2, 2, key=key)
    sequential = eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1), linear])
    assert jax.tree.leaves(layer_scales(sequential, 0.5)) == [0.5, 0.5, 1.0, 1.0]


def stack(make, depth: int) -> nn.Stack:
    return nn.Stack(make, depth, key=jax.random.key(0))


def linear(key=None) -> nn.Linear:
    return nn.Linear(2, 2, use_bias=False, key=jax.random.key(0))


class Model(eqx.Module):
    """Parts of any kind in the order of the fields."""

    first: Any = None
    second: Any = None
    third: Any = None
    norm: Any = None
    head: Any = None


def numbers(model: PyTree) -> list[Any]:
    """The layer of each leaf, counted back from the last, which is 0."""
    return [np.abs(np.log2(scale)).ravel().tolist() for scale in jax.tree.leaves(layer_scales(model, 0.5))]


def test_layers_are_those_of_stacks_and_of_lists_of_stages():
    norm = nn.RMSNorm(2)
    assert numbers(stack(linear, 3)) == [[2, 1, 0]]
    assert numbers(Model(linear(), stack(lambda key: norm, 3), head=linear())) == [[4], [3, 2, 1], [0]]
    assert numbers(Model(norm, jnp.ones(2), stack(linear, 2))) == [[2], [2], [1, 0]]
    assert numbers(Model(stack(linear, 2), stack(linear, 2))) == [[3, 2], [1, 0]]
    # What leads to a stage belongs to its first block, whatever there is of the block's own type is a block.
    stage = Model(norm, stack(linear, 2))
    assert numbers(Model((stage, stage), head=norm)) == [[5], [4, 3], [2], [2, 1], [0]]
    stage = Model(linear(), stack(linear, 2))
    assert numbers(Model([stage, linear(), stage])) == [[6], [5, 4], [3], [2], [1, 0]]
    # A whole model within another.
    assert numbers(Model(Model(norm, stack(linear, 2), norm=norm), head=norm)) == [[3], [2, 1], [1], [0]]


def test_a_final_norm_belongs_to_the_last_block():
    norm = nn.RMSNorm(2)
    assert numbers(Model(stack(linear, 2), norm=norm, head=linear())) == [[2, 1], [1], [0]]
    assert numbers(Model(stack(linear, 2), norm=norm)) == [[1, 0], [0]]
    assert numbers(Model(stack(linear, 2), third=norm)) == [[2, 1], [0]]
    assert numbers(Model(stack(linear, 2), norm=norm, head=stack(linear, 2))) == [[3, 2], [1], [1, 0]]
    assert numbers(Model(stack(linear, 2), norm=norm, head=jax.nn.relu)) == [[1, 0], [0]]


def test_stacks_in_a_stack_are_parts_of_its_layers():
    model = stack(lambda key: Model(stack(linear, 3), nn.RMSNorm(2)), 2)
    scales = layer_scales(model, 0.5)
    assert [scale.shape for scale in jax.tree.leaves(scales)] == [(2, 1, 1, 1), (2, 1)]
    assert [scale.ravel().tolist() for scale in jax.tree.leaves(scales)] == [[0.5, 1.0], [0.5, 1.0]]


def test_the_scales_of_a_member_fit_an_ensemble():
    model = Model(linear(), stack(linear, 3))
    many = ensemble(model)
    scaled = jax.tree.map(lambda leaf, scale: leaf * scale, many, layer_scales(model, 0.5))
    alone = jax.tree.map(lambda leaf, scale: leaf * scale, model, layer_scales(model, 0.5))
    assert eqx.tree_equal(scaled, ensemble(alone))
    with pytest.raises(
        ValueError, match=r"second\[\*\].weight of shape \(2, 3, 2, 2\) does not lead with its 3 layers"
    ):
        layer_scales(many, 0.5)


class Parameters(NamedTuple):
    embedding: Array
    blocks: list[Array]
    head: Array


def test_the_fields_of_a_named_tuple_are_no_list_of_layers():
    one = jnp.ones(1)
    assert layer_scales(Parameters(one, [one, one], one), 0.5) == Parameters(0.125, [0.25, 0.5], 1.0)


def test_a_model_without_an_order_of_layers_is_an_error():
    with pytest.raises(ValueError, match=r"^layer_scales: a Linear has no layers .* pass the part that has$"):
        layer_scales(linear(), 0.5)
    with pytest.raises(ValueError, match=r"a Model has no layers"):
        layer_scales(Model(linear(), head=linear()), 0.5)
    with pytest.raises(
        ValueError, match=r"a dict has no order of layers, for JAX sorts its keys; pass a list, a tuple"
    ):
        layer_scales({"blocks": [jnp.ones(1)], "embedding": jnp.ones(1)}, 0.5)
    for decay in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"decay={decay} .* pass 0 < decay <= 1$"):
            layer_scales([jnp.ones(1)], decay)


@pytest.mark.parametrize("name", ["ResNet", "ViT"])
@pytest.mark.parametrize("split", [trainable, freeze])
def test_a_probe_moves_its_part_and_leaves_all_else_bit_for_bit(name, split):
    row = MODELS[name]
    model, state = randomised(row, 0)
    where = "head" if split is trainable else lambda path, leaf: not path.startswith("head")
    part, rest = split(model, where)
    assert eqx.tree_equal(eqx.combine(part, rest), model)
    xs, keys = batch_and_keys(row)
    optimizer = optax.adam(1e-2)

    @eqx.filter_jit
    def step(part, rest, opt_state):
        def loss(part):
            call = lambda x, key: eqzoo.apply(eqx.combine(part, rest), state, x, key=key)[0]
            return error(jax.vmap(call, axis_name="batch")(xs, keys))

        gradients = eqx.filter_grad(loss)(part)
        updates, opt_state = optimizer.update(gradients, opt_state, part)
        return eqx.apply_updates(part, updates), gradients, opt_state

    new, gradients, opt_state = step(part, rest, optimizer.init(part))
    head = ["head.weight", "head.bias"]
    assert [path for path, _ in leaves_with_paths(gradients)] == head
    assert [path for path, _ in leaves_with_paths(opt_state[0].mu)] == head
    moved = eqx.combine(new, rest)
    for (path, old), leaf in zip(leaves_with_paths(model), jax.tree.leaves(moved), strict=True):
        if path in head:
            assert jnp.all(old != leaf)
        else:
            assert leaf is old


def test_only_float_arrays_are_trainable_and_only_what_is_meant_is_frozen():
    tree = {"a": jnp.ones(2), "b": jnp.ones(2, int), "rate": 0.5, "f": jax.nn.relu, "c": [jnp.zeros(3), True]}
    none = {"a": None, "b": None, "rate": None, "f": None, "c": [None, None]}
    assert trainable(tree, "*")[0] == {**none, "a": tree["a"], "c": [tree["c"][0], None]}
    assert trainable(tree, "a") == ({**none, "a": tree["a"]}, {**tree, "a": None})
    assert freeze(tree, "c") == trainable(tree, "a")
    with pytest.raises(ValueError, match="select: .*'haed'"):
        trainable(tree, "haed")
    with pytest.raises(ValueError, match="select: .*'haed'"):
        freeze(tree, "haed")
    shapes, rest = trainable(jax.eval_shape(lambda: {"a": jnp.ones(2), "b": jnp.ones(2)}), "a")
    assert shapes["a"].shape == (2,)
    assert (shapes["b"], rest["a"]) == (None, None)


def test_a_stack_is_trained_whole():
    model, _ = MODELS["GPT2"].skeleton()
    part, _ = trainable(model, "blocks[*].mlp")
    assert [path for path, _ in leaves_with_paths(part)] == [
        f"blocks[*].mlp.{layer}.{leaf}" for layer in ("fc1", "fc2") for leaf in ("weight", "bias")
    ]


def test_masks_keep_a_trees_paths():
    model, _ = MODELS["ViT"].skeleton()
    names = map_with_path(lambda path, leaf: path, model)
    assert [path for path, _ in leaves_with_paths(decay_mask(model))] == jax.tree.leaves(names)
