"""Low-rank adapters fit families of each kind, train alone, and go into a file alone."""

import json
from math import prod, sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import eqzoo
from eqzoo import nn
from eqzoo.checkpoint import CheckpointError, open_checkpoint, write_safetensors
from eqzoo.tree import leaves_with_paths
from eqzoo.tree.int8 import quantize
from eqzoo.tree.lora import LoRA, load_lora, lora, lora_keys, lora_only, merge_lora, save_lora, unmerge_lora
from tests.contract.table import KINDS, assert_close, randomised, train
from tests.contract.table import error as loss_of

CONFIG = eqzoo.GPT2Config(dim=16, depth=3, heads=2, hidden=24, vocab=40, context=12)
ADAPTED = ("*.query", "*.value", "*.mlp")


def gpt2(config=CONFIG):
    """A model whose logits are no longer all alike."""
    model = eqzoo.GPT2(config, key=jax.random.key(0))
    return eqx.tree_at(lambda model: model.embedding.weight, model, replace_fn=lambda weight: 10 * weight)


@eqx.filter_jit
def call(model, *inputs):
    return model(*inputs)


def with_random_factors(model, seed=5):
    """An adapted model that has learned something."""
    adapters, frozen = lora_only(model)
    generator = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(0.3 * generator.standard_normal(leaf.shape), leaf.dtype)
    return eqx.combine(jax.tree.map(draw, adapters), frozen)


def adapters_of(model):
    return [node for _, node in leaves_with_paths(model, is_leaf=is_lora) if is_lora(node)]


def is_lora(node):
    return isinstance(node, LoRA)


# Every family


@pytest.fixture(scope="module", params=KINDS, ids=lambda row: row.model.__name__)
def family(request):
    """A row of the table with its model, the same with adapters as they start, and with adapters that have learned."""
    row = request.param
    model, state = randomised(row, seed=0)
    where = lambda path, leaf: not (row.model is eqzoo.ResNet and ".convs.1." in path)  # these have groups
    start = lora(model, where, rank=2, alpha=3.0, key=jax.random.key(1))
    return row, model, state, start, with_random_factors(start)


def test_every_layer_that_is_meant_gets_an_adapter_for_each_layer_of_a_stack(family):
    start = family[3]
    layers = (nn.Linear, nn.Conv2d, nn.Embedding)
    is_layer = lambda node: isinstance(node, (LoRA, *layers))
    kinds = {path: node for path, node in leaves_with_paths(start, is_leaf=is_layer) if is_layer(node)}
    groups = {path for path, node in kinds.items() if getattr(node, "groups", 1) > 1}
    assert {path for path, node in kinds.items() if not is_lora(node)} == groups
    for path, node in kinds.items():
        if is_lora(node):
            depth = path.count("[*]")
            random = node.up if isinstance(node.layer, nn.Embedding) else node.down
            assert node.down.shape[:depth] == node.up.shape[:depth] == node.layer.weight.shape[:depth]
            assert node.change.shape == node.layer.weight.shape
            flat = random.reshape(-1, prod(random.shape[depth:]))
            assert len(np.unique(flat, axis=0)) == len(flat), f"{path}: two layers drew the same numbers"
    drawn = [node.down.ravel()[:8] for node in adapters_of(start) if not isinstance(node.layer, nn.Embedding)]
    drawn = [tuple(np.sign(each).tolist()) + tuple((each / np.abs(each).max()).tolist()) for each in drawn]
    assert len(set(drawn)) == len(drawn), "two adapters drew the same numbers"


def test_adapters_change_nothing_at_first_and_merged_they_compute_the_same(family):
    row, model, state, start, adapted = family
    predict = eqx.filter_jit(lambda model, state, xs: jax.vmap(eqzoo.freeze(model, state))(xs))
    xs = row.batch(1)
    outputs = predict(model, state, xs)
    assert_close(predict(start, state, xs), np.asarray(outputs), 1e-6)
    merged = merge_lora(adapted)
    learned = np.asarray(predict(adapted, state, xs))
    assert np.abs(learned - outputs).max() > 0.05 * np.abs(outputs).max(), "the adapters have no effect"
    assert_close(predict(merged, state, xs), learned, 1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    again = unmerge_lora(merged, adapted)
    assert jax.tree.structure(again) == jax.tree.structure(adapted)
    assert_close(predict(again, state, xs), learned, 1e-5)
    for leaf, before in zip(jax.tree.leaves(again), jax.tree.leaves(adapted), strict=True):
        if eqx.is_array(leaf):
            np.testing.assert_allclose(leaf, before, rtol=0, atol=1e-6)


def test_in_training_every_adapter_has_a_gradient_and_nothing_else_has(family):
    row, _, state, _, adapted = family
    adapters, frozen = lora_only(adapted)
    assert len(jax.tree.leaves(adapters)) == 2 * len(adapters_of(adapted))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(adapters, frozen, state, xs, keys):
        return loss_of(train(eqx.combine(adapters, frozen), state, xs, keys)[0])

    xs = row.batch(1)
    gradients = gradient(adapters, frozen, state, xs, jax.random.split(jax.random.key(2), len(xs)))
    assert jax.tree.structure(gradients) == jax.tree.structure(adapters)
    for path, leaf in leaves_with_paths(gradients):
        layers = leaf.reshape(-1, prod(leaf.shape[path.count("[*]") :]))
        assert np.isfinite(layers).all(), path
        assert np.abs(layers).max(axis=1).min() > 0, f"{path}: a layer has no gradient"


# Dropout


def transparent(rate, dim=64, depth=4):
    """A stack of layers whose output is what their dropout leaves of the input."""
    stack = nn.Stack(lambda key: nn.Linear(dim, dim, use_bias=False, key=key), depth, key=jax.random.key(0))
    stack = lora(stack, nn.Linear, rank=dim, alpha=float(dim), dropout=rate, key=jax.random.key(1))
    eye = jnp.broadcast_to(jnp.eye(dim), (depth, dim, dim))
    return eqx.tree_at(
        lambda stack: (stack.block.layer.weight, stack.block.down, stack.block.up), stack, (0 * eye, eye, eye)
    )


@eqx.filter_jit
def dropped(stack, keys):
    """Ones through each layer by itself: (examples, layers, dim)."""

    def one(key):
        keyed = lora_keys(stack, key)
        return keyed.scan(lambda layer, carry, _: (carry, layer(jnp.ones(64))), None)[1]

    return jax.vmap(one)(keys)


def test_dropout_differs_by_example_by_layer_and_by_key():
    stack = transparent(0.25)
    keys = jax.random.split(jax.random.key(3), 50)
    outputs = np.asarray(dropped(stack, keys))
    assert set(np.unique(outputs)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    rows = outputs.reshape(200, 64)
    assert len(np.unique(rows, axis=0)) == 200, "two layers or examples dropped alike"
    overlap = np.corrcoef(rows)[np.triu_indices(200, 1)]
    assert np.abs(overlap.mean()) < 0.01
    assert abs(outputs.mean() - 1) < 4 * sqrt(0.25 / 0.75 / outputs.size)
    assert np.array_equal(outputs, dropped(stack, keys))
    assert not np.array_equal(outputs, dropped(stack, jax.random.split(jax.random.key(4), 50)))


def test_two_adapters_of_one_model_drop_differently():
    layer = nn.Linear(64, 64, use_bias=False, key=jax.random.key(0))
    pair = lora([layer, layer], nn.Linear, rank=1, dropout=0.5, key=jax.random.key(1))
    keyed = lora_keys(pair, jax.random.key(2))
    masks = [each.dropout(jnp.ones(64), key=each.key) for each in keyed]
    assert not np.array_equal(*masks)


def test_dropout_without_a_key_raises_and_inference_mode_needs_none():
    stack = transparent(0.25)
    with pytest.raises(ValueError, match=r"LoRA\(dropout=0.25\) got no key .*`lora_keys\(model, key\)\(x\)`"):
        stack(jnp.ones(64))
    inference = eqx.nn.inference_mode(stack)
    assert np.array_equal(inference(jnp.ones(64)), jnp.ones(64))
    assert np.array_equal(lora_keys(inference, jax.random.key(0))(jnp.ones(64)), jnp.ones(64))
    assert np.array_equal(transparent(0.0)(jnp.ones(64)), jnp.ones(64))


# GPT-2


def next_token_loss(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def test_training_moves_the_adapters_alone_and_holds_gradients_and_moments_of_them_alone():
    model = eqx.nn.inference_mode(gpt2())
    before = jax.tree.map(lambda leaf: np.array(leaf) if eqx.is_array(leaf) else leaf, model)
    adapters, frozen = lora_only(lora(model, ADAPTED, rank=2, dropout=0.1, key=jax.random.key(1)))
    optimizer = optax.adam(5e-2)
    opt_state = optimizer.init(adapters)
    tokens = jnp.tile(jnp.arange(11), (3, 1))

    @eqx.filter_jit
    def step(adapters, opt_state, key):
        def loss(adapters):
            model = eqx.combine(adapters, frozen)
            logits = jax.vmap(lambda x, key: lora_keys(model, key)(x))(tokens[:, :-1], jax.random.split(key, 3))
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = eqx.filter_value_and_grad(loss)(adapters)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return eqx.apply_updates(adapters, updates), opt_state, value, gradients

    values = []
    for turn in range(40):
        adapters, opt_state, value, gradients = step(adapters, opt_state, jax.random.key(turn))
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]  # over other seeds, 0.42 to 0.67
    dim, hidden, depth, rank = 16, 24, 3, 2
    numbers = depth * rank * (2 * (dim + dim) + 2 * (dim + hidden))  # query and value, fc1 and fc2
    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert nbytes(adapters) == nbytes(gradients) == 4 * numbers
    assert nbytes(opt_state) == 2 * 4 * numbers + 4  # and the counter
    trained = eqx.combine(adapters, frozen)
    bare = jax.tree.map(lambda node: node.layer if is_lora(node) else node, trained, is_leaf=is_lora)
    for (path, leaf), old in zip(leaves_with_paths(bare), jax.tree.leaves(before), strict=True):
        if eqx.is_array(leaf):
            assert np.array_equal(leaf, old), path


def _products(jaxpr):
    """The shapes of all matrix products of a program and of the programs in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr)):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _products(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def test_a_step_computes_no_gradient_of_a_base_weight():
    model = eqx.nn.inference_mode(gpt2())
    tokens = jnp.zeros((3, 11), jnp.int32)
    weights = {(16, 16), (24, 16), (16, 24), (40, 16), (16, 40)}

    def products(part, rest):
        step = jax.value_and_grad(lambda part: next_token_loss(eqx.combine(part, rest), tokens))
        return set(_products(jax.make_jaxpr(step)(part).jaxpr))

    assert products(*eqx.partition(model, eqx.is_inexact_array)) >= weights - {(16, 40), (16, 24)}
    assert not products(*lora_only(lora(model, ADAPTED, rank=2, key=jax.random.key(1)))) & weights


def test_a_tied_head_reads_the_adapted_embedding():
    adapted = with_random_factors(lora(eqx.nn.inference_mode(gpt2()), "embedding", rank=2, key=jax.random.key(1)))
    tokens = jnp.arange(10)
    logits, hidden = call(adapted, tokens), call(adapted.hidden, tokens)
    assert_close(logits, np.asarray(hidden @ merge_lora(adapted).embedding.weight.T), 1e-5)
    assert np.abs(logits - hidden @ adapted.embedding.layer.weight.T).max() > 0.1 * np.abs(logits).max()


# Layers of other kinds and dtypes


def test_convolutions_that_peft_has_none_for():
    image = jax.random.normal(jax.random.key(0), (9, 8, 3))
    for options in ({"dilation": 2, "padding": 2}, {"padding": "same"}, {"padding": "same_tf", "stride": 2}):
        conv = lora(nn.Conv2d(3, 4, 3, **options, key=jax.random.key(0)), "weight", rank=2, key=jax.random.key(1))
        conv = with_random_factors(conv)
        assert_close(merge_lora(conv)(image), np.asarray(conv(image)), 1e-5)


def test_equinoxs_linear_and_its_scalar_features():
    network = eqx.nn.MLP(3, "scalar", 8, 2, key=jax.random.key(0))
    adapted = lora(network, eqx.nn.Linear, rank=2, key=jax.random.key(1))
    x = jnp.arange(3.0)
    assert np.array_equal(adapted(x), network(x))
    adapted = with_random_factors(adapted)
    assert adapted(x).shape == ()
    assert_close(merge_lora(adapted)(x), np.asarray(adapted(x)), 1e-5)
    single = lora(eqx.nn.Linear("scalar", 4, key=jax.random.key(0)), "weight", key=jax.random.key(1))
    single = with_random_factors(single)
    assert_close(merge_lora(single)(jnp.array(2.0)), np.asarray(single(jnp.array(2.0))), 1e-5)


def test_dropout_takes_the_key_that_a_layer_is_called_with():
    layer = lora(eqx.nn.Linear(64, 4, key=jax.random.key(0)), "weight", dropout=0.5, key=jax.random.key(1))
    layer = with_random_factors(layer)
    x, keys = jnp.ones(64), jax.random.split(jax.random.key(2))
    network = eqx.nn.Sequential([layer])
    assert not np.array_equal(network(x, key=keys[0]), network(x, key=keys[1]))
    assert np.array_equal(layer(x, key=keys[0]), lora_keys(layer, keys[1])(x, key=keys[0]))


def test_half_precision_keeps_its_dtype_beside_adapters_in_float32():
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_array(x) else x, eqx.nn.inference_mode(gpt2()))
    adapted = with_random_factors(lora(model, ("embedding", *ADAPTED), rank=2, key=jax.random.key(1)))
    assert {leaf.dtype for leaf in jax.tree.leaves(lora_only(adapted)[0])} == {jnp.dtype("float32")}
    assert call(adapted, jnp.arange(10)).dtype == jnp.bfloat16
    merged = merge_lora(adapted)
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(merged, eqx.is_array))} == {jnp.dtype(jnp.bfloat16)}


def test_over_int8_layers():
    model = eqx.nn.inference_mode(gpt2())
    small = quantize(model, (nn.Linear, nn.Embedding))
    tokens = jnp.arange(10)
    start = lora(small, (nn.Linear, nn.Embedding), rank=2, key=jax.random.key(1))
    assert_close(call(start, tokens), np.asarray(call(small, tokens)), 1e-6)
    adapted = with_random_factors(start)
    assert adapted.blocks.block.attention.query.layer.layer.weight.dtype == jnp.int8
    adapters, frozen = lora_only(adapted)
    loss = lambda adapters: next_token_loss(eqx.combine(adapters, frozen), tokens[None])
    gradients = eqx.filter_jit(eqx.filter_grad(loss))(adapters)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients))
    merged = merge_lora(adapted)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert_close(call(merged, tokens), np.asarray(call(adapted, tokens)), 1e-5)
    assert_close(call(unmerge_lora(merged, adapted), tokens), np.asarray(call(adapted, tokens)), 1e-5)


# Files


def assert_same(tree, expected):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for (path, leaf), other in zip(leaves_with_paths(tree), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(leaf):
            assert leaf.dtype == other.dtype, path
            assert np.array_equal(leaf, other), path


def test_a_file_holds_the_adapters_alone_and_brings_them_back(family, tmp_path):
    _, model, _, _, adapted = family
    path = tmp_path / "adapter.safetensors"
    save_lora(path, adapted)
    tensors, _ = open_checkpoint(path)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(lora_only(adapted)[0]))
    assert sum(prod(tensor.shape) for tensor in tensors.values()) == numbers
    assert_same(load_lora(path, model), adapted)


def test_ranks_dtypes_and_names_of_a_file(tmp_path):
    model, half = gpt2(), lambda leaf: leaf.astype(jnp.bfloat16)
    adapted = lora(model, "*.query", rank=3, alpha=7.5, dropout=0.2, key=jax.random.key(1))
    adapted = with_random_factors(lora(adapted, "*.value", rank=2, key=jax.random.key(2)))
    adapted = eqx.tree_at(lambda model: model.blocks.block.attention.query.up, adapted, replace_fn=half)
    path = tmp_path / "adapter.safetensors"
    save_lora(path, adapted)
    tensors, _ = open_checkpoint(path)
    assert tensors["blocks[2].attention.query.down"].shape == (3, 16)
    assert len(tensors) == 2 * 2 * 3
    assert_same(load_lora(path, model), adapted)


def test_a_file_for_another_model_says_what_does_not_fit(tmp_path):
    path = tmp_path / "adapter.safetensors"
    save_lora(path, lora(gpt2(), "*.query", rank=2, key=jax.random.key(1)))

    def config(**changes):
        return eqzoo.GPT2Config(**{**vars(CONFIG), **changes})

    with pytest.raises(CheckpointError, match=r"0 missing, 2 unexpected.*\n(.*\n)* +blocks\[2\].attention.query.down"):
        load_lora(path, gpt2(config(depth=2)))
    with pytest.raises(CheckpointError, match=r"2 missing, 0 unexpected.*\n(.*\n)* +blocks\[3\].attention.query.down"):
        load_lora(path, gpt2(config(depth=4)))
    with pytest.raises(CheckpointError, match=r"query.down: shape \(2, 16\) in the file, \(2, 32\) in the model"):
        load_lora(path, gpt2(config(dim=32)))
    with pytest.raises(CheckpointError, match=r"this MLP: it has no 'blocks\[\*\].attention.query'; load it into"):
        load_lora(path, eqzoo.MLP(eqzoo.MLPConfig(hidden=(4,), image_size=2), key=jax.random.key(0)))
    with pytest.raises(CheckpointError, match=r"query: .* has an adapter can't get another; call `merge_lora`"):
        load_lora(path, lora(gpt2(), "*.query", rank=2, key=jax.random.key(1)))


def test_a_file_that_is_no_adapter_or_lies_about_it_is_refused(tmp_path):
    model = gpt2()
    path = tmp_path / "model.safetensors"
    eqzoo.save(path, model)
    with pytest.raises(CheckpointError, match=r"model.safetensors holds no adapters that `save_lora` wrote; `eqzoo"):
        load_lora(path, model)
    query = "blocks[*].attention.query"
    fine = {"rank": 2, "alpha": 8.0, "dropout": 0.0}
    for said in (
        "not json",
        "[1, 2]",
        "{}",
        json.dumps({query: 3}),
        json.dumps({query: {"rank": 2}}),
        json.dumps({query: {**fine, "rank": 10**12}}),
        json.dumps({query: {**fine, "rank": 10**30}}),
        json.dumps({query: {**fine, "rank": -1}}),
        json.dumps({query: {**fine, "dropout": 2.0}}),
        json.dumps({"positions": fine}),
    ):
        write_safetensors(path, {f"{query}.down": np.zeros((2, 16), np.float32)}, {"eqzoo_lora": said})
        with pytest.raises(CheckpointError, match=r"does not fit this GPT2"):
            load_lora(path, model)


# What is refused


def test_what_can_not_be_adapted_is_named():
    model = gpt2()
    with pytest.raises(ValueError, match=r"no layer that can be adapted \(eqzoo.nn.Linear.*'blocks\[\*\].mlp.fc1'"):
        lora(model, "positions", key=jax.random.key(0))
    with pytest.raises(ValueError, match="no number's path matches 'querry'"):
        lora(model, "querry", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"lora: blocks\[\*\].attention.query: .*; call `merge_lora` first"):
        lora(lora(model, "*.query", key=jax.random.key(0)), nn.Linear, key=jax.random.key(0))
    layers = [nn.Linear(2, 2, key=jax.random.key(0)), nn.Conv2d(4, 4, 3, groups=2, key=jax.random.key(0))]
    with pytest.raises(ValueError, match=r"lora: 1: a convolution with groups=2 can't be adapted; select layers"):
        lora(layers, lambda path, leaf: True, key=jax.random.key(0))
    with pytest.raises(ValueError, match="rank=0 leaves nothing to train; pass rank >= 1"):
        lora(model, "*.query", rank=0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="a LayerNorm can't be adapted; eqzoo.nn.Linear, "):
        LoRA(nn.LayerNorm(3), key=jax.random.key(0))
    for function in (lora_only, merge_lora, lambda model: lora_keys(model, jax.random.key(0))):
        with pytest.raises(ValueError, match=r"^(lora_\w+|merge_lora): this GPT2 has no adapters; make them with"):
            function(model)
    adapted = lora(model, "*.query", key=jax.random.key(0))
    with pytest.raises(ValueError, match="^unmerge_lora: "):
        unmerge_lora(eqx.tree_at(lambda model: model.positions, model, jnp.zeros((3, 16))), adapted)
