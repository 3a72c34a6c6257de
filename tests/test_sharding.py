"""Where numbers live: meshes, partition rules, and a training step that doesn't notice."""

import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import eqzoo
from eqzoo import tree
from eqzoo.sharding import Devices, batch_sharding, gather, make_mesh, shard, shard_batch, shardings
from eqzoo.train import OptimizerOptions, TrainState
from eqzoo.tree import leaves_with_paths

MLP = eqzoo.MLPConfig(hidden=(16, 24), image_size=4, num_classes=8)
RESNET = eqzoo.ResNetConfig(block="basic", depths=(3,), widths=(8,), stem="deep", stem_width=4, num_classes=8)
VIT = eqzoo.ViTConfig(dim=16, depth=2, heads=2, patch_size=4, image_size=8, num_classes=8)
GPT = eqzoo.GPT2Config(dim=16, depth=2, heads=2, vocab=41, context=8)


@pytest.fixture
def mesh():
    return make_mesh(data=2, fsdp=2, model=2)


def specs(make, mesh, rules=None) -> dict[str, P]:
    """The partition of each leaf of a model, as written; axes of size one or left out are None."""
    skeleton = eqx.filter_eval_shape(lambda: make(key=jax.random.key(0)))
    return {path: _plain(place.spec) for path, place in leaves_with_paths(shardings(skeleton, mesh, rules))}


def _plain(spec: P) -> tuple:
    parts = [part[0] if isinstance(part, tuple) and len(part) == 1 else part or None for part in spec]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(parts)


def test_mesh_has_all_devices_and_three_axes(mesh):
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "model": 2}
    assert dict(make_mesh(fsdp=8).shape) == {"data": 1, "fsdp": 8, "model": 1}


def test_mesh_of_a_wrong_size():
    with pytest.raises(ValueError, match=r"data=3 x fsdp=1 x model=2 is 6, but there are 8 devices; choose sizes"):
        make_mesh(data=3, model=2)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda key: eqzoo.MLP(MLP, key=key),
            {
                "layers.0.linear.weight": ("model", "fsdp"),
                "layers.1.linear.bias": ("model",),
                "head.weight": ("model", "fsdp"),
                "head.bias": (),
            },
        ),
        (
            lambda key: eqx.nn.make_with_state(eqzoo.ResNet)(RESNET, key=key)[0],
            {
                "stem.conv1.conv.weight": ("model",),  # three input channels have no two halves
                "stages.0.first.convs.0.conv.weight": ("model", "fsdp"),
                "stages.0.rest[*].convs.1.conv.weight": (None, "model", "fsdp"),
                "stages.0.rest[*].convs.1.norm.weight": (),
                "head.weight": ("model", "fsdp"),
            },
        ),
        (
            lambda key: eqzoo.ViT(VIT, key=key),
            {
                "patch_embed.conv.weight": (("model", "fsdp"),),
                "positions": (),
                "blocks[*].attention.query.weight": (None, "model", "fsdp"),
                "blocks[*].attention.value.bias": (None, "model"),
                "blocks[*].attention.out.weight": (None, "fsdp", "model"),
                "blocks[*].mlp.fc1.weight": (None, "model", "fsdp"),
                "blocks[*].mlp.fc2.weight": (None, "fsdp", "model"),
                "blocks[*].norm1.weight": (),
                "head.weight": ("model", "fsdp"),
            },
        ),
        (
            lambda key: eqzoo.GPT2(GPT, key=key),
            {
                "embedding.weight": (None, ("model", "fsdp")),
                "positions": (None, ("model", "fsdp")),
                "blocks[*].attention.key.weight": (None, "model", "fsdp"),
                "blocks[*].attention.key.bias": (None, "model"),
                "blocks[*].attention.out.weight": (None, "fsdp", "model"),
                "blocks[*].attention.out.bias": (),
                "blocks[*].mlp.fc1.bias": (None, "model"),
                "blocks[*].mlp.fc2.weight": (None, "fsdp", "model"),
                "norm.weight": (),
            },
        ),
    ],
    ids=["MLP", "ResNet", "ViT", "GPT2"],
)
def test_a_family_s_own_rules(make, expected, mesh):
    """The layer axis of a stack is never split, though two layers could be."""
    found = specs(make, mesh)
    assert {path: found[path] for path in expected} == expected


def test_adapters_and_int8_leave_a_weight_where_it_was(mesh):
    gpt = lambda key: eqzoo.GPT2(GPT, key=key)
    plain = specs(gpt, mesh)["blocks[*].attention.out.weight"]
    assert plain == (None, "fsdp", "model")
    changed = specs(lambda key: tree.lora(tree.quantize(gpt(key), "*.out"), "*.attention", rank=2, key=key), mesh)
    assert changed["blocks[*].attention.out.layer.layer.weight"] == plain
    assert changed["blocks[*].attention.query.layer.weight"] == (None, "model", "fsdp")
    assert changed["blocks[*].attention.query.down"] == ()


def test_an_axis_that_does_not_divide_is_left_out(mesh):
    """Of several for one array axis, those stay that divide it; the other array axes keep theirs."""
    tree = {"a": jnp.zeros((6, 4)), "b": jnp.zeros((3, 4)), "c": jnp.zeros((8, 5))}
    found = shardings(tree, mesh, [(r".", P(("model", "fsdp"), "data"))])
    assert {path: _plain(place.spec) for path, place in found.items()} == {
        "a": ("model", "data"),
        "b": (None, "data"),
        "c": (("model", "fsdp"),),
    }


def test_given_rules_override_the_family_s(mesh):
    """The first whose regex matches a whole path counts, and the family's no longer do."""
    rules = [(r"head\.weight", P("data")), (r".*weight", P("fsdp")), (r"weight", P("model"))]
    found = specs(lambda key: eqzoo.MLP(MLP, key=key), mesh, rules)
    assert found["head.weight"] == ("data",)
    assert found["layers.0.linear.weight"] == ("fsdp",)
    assert found["layers.0.linear.bias"] == ()


def test_a_tree_without_rules_is_copied_to_every_device(mesh):
    placed = shard({"a": jnp.arange(8.0), "b": "text"}, mesh)
    assert placed["a"].is_fully_replicated
    assert len(placed["a"].sharding.device_set) == 8
    assert placed["b"] == "text"


def test_shard_places_by_the_rules(mesh):
    model = eqzoo.MLP(MLP, key=jax.random.key(0))
    placed = shard(model, mesh)
    weight = placed.layers[0].linear.weight
    assert weight.sharding.is_equivalent_to(jax.NamedSharding(mesh, P("model", "fsdp")), 2)
    assert {piece.data.shape for piece in weight.addressable_shards} == {(8, 8)}
    assert eqx.tree_equal(
        jax.device_get(eqx.filter(placed, eqx.is_array)), jax.device_get(eqx.filter(model, eqx.is_array))
    )


def test_shard_batch(mesh):
    """The batch is split over "data" and "fsdp", the other axes are whole, the numbers and dtypes stay."""
    batch = {"image": jnp.arange(8 * 3, dtype=jnp.float32).reshape(8, 3), "label": jnp.arange(8)}
    placed = shard_batch(batch, mesh)
    for name, array in batch.items():
        assert placed[name].dtype == array.dtype
        assert placed[name].sharding == batch_sharding(mesh)
        assert {piece.data.shape for piece in placed[name].addressable_shards} == {(2, *array.shape[1:])}
        assert np.array_equal(placed[name], array)


OPTIMISER = optax.sgd(0.1, momentum=0.9)


@eqx.filter_jit
def train_step(model, state, opt_state, xs, labels):
    def loss(model):
        call = lambda x: eqzoo.apply(model, state, x)
        logits, new_state = jax.vmap(call, axis_name="batch", out_axes=(0, None))(xs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new_state

    (value, state), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
    updates, opt_state = OPTIMISER.update(gradients, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, value


def three_steps(model, state, opt_state, batches):
    losses = []
    for xs, labels in batches:
        model, state, opt_state, value = train_step(model, state, opt_state, xs, labels)
        losses.append(value)
    return model, state, opt_state, losses


def test_the_optimiser_s_state_lives_with_its_parameters(mesh):
    model = shard(eqzoo.MLP(MLP, key=jax.random.key(0)), mesh)
    opt_state = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
    for moments in (opt_state[0].mu, opt_state[0].nu):
        pairs = zip(jax.tree.leaves(moments), jax.tree.leaves(eqx.filter(model, eqx.is_array)), strict=True)
        assert all(moment.sharding == parameter.sharding for moment, parameter in pairs)


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "model": 2}], ids=str)
def test_training_is_the_same_on_eight_devices(sizes):
    """Three steps of SGD with momentum on a model with batch statistics: parameters, statistics, momenta and losses."""
    mesh = make_mesh(**sizes)
    model, state = eqx.nn.make_with_state(eqzoo.ResNet)(RESNET, key=jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    batches = [(jax.random.normal(key, (16, 16, 16, 3)), jax.random.randint(key, 16, 0, 8)) for key in keys]
    parameters = lambda model: eqx.filter(model, eqx.is_array)
    sharded_model, sharded_state = shard(model, mesh), shard(state, mesh)

    alone = three_steps(model, state, OPTIMISER.init(parameters(model)), batches)
    together = three_steps(
        sharded_model, sharded_state, OPTIMISER.init(parameters(sharded_model)), [shard_batch(b, mesh) for b in batches]
    )
    assert alone[3][2] < alone[3][0]
    pairs = zip(
        jax.tree.leaves(eqx.filter(together, eqx.is_array)),
        jax.tree.leaves(eqx.filter(alone, eqx.is_array)),
        strict=True,
    )
    for ours, expected in pairs:
        ours, expected = np.asarray(ours), np.asarray(expected)
        assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


def test_a_frozen_model_is_placed_by_its_models_rules(mesh):
    model, state = eqx.nn.make_with_state(eqzoo.ResNet)(RESNET, key=jax.random.key(0))
    frozen = shard(eqzoo.freeze(model, state), mesh)
    expected = shard(model, mesh)
    placed = lambda tree: [leaf.sharding for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]
    assert placed(frozen.model) == placed(expected)
    assert all(sharding.is_fully_replicated for sharding in placed(frozen.state))
    assert frozen(jnp.zeros((16, 16, 3))).shape == (8,)


def test_a_batch_that_does_not_divide(mesh):
    with pytest.raises(ValueError, match=r"a batch of 6 examples has no 4 parts .* data=2 x fsdp=2 .* a multiple of 4"):
        shard_batch({"image": np.zeros((6, 3))}, mesh)


def test_gather_puts_a_whole_copy_on_every_device(mesh):
    model = eqzoo.MLP(MLP, key=jax.random.key(0))
    given = {"model": model, "key": jax.random.key(1), "text": "text"}
    sharded = {"model": shard(model, mesh), "key": shard(jax.random.key(1), mesh), "text": "text"}
    for gathered in (gather(sharded, mesh), eqx.filter_jit(gather)(sharded, mesh)):
        arrays = jax.tree.leaves(eqx.filter(gathered, eqx.is_array))
        assert all(array.is_fully_replicated and len(array.sharding.device_set) == 8 for array in arrays)
        assert eqx.tree_equal(jax.device_get(gathered), jax.device_get(given))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon"])
def test_moments_and_averages_are_where_their_weights_are(optimizer, mesh):
    """Placed at the start, and again by a step that is compiled; all else goes to every device."""
    model, state = eqx.nn.make_with_state(eqzoo.GPT2)(GPT, key=jax.random.key(0))
    given = TrainState.create(
        model, state, OptimizerOptions(optimizer=optimizer).make(model, 10), key=jax.random.key(1), ema=True
    )
    places = dict(leaves_with_paths(shardings(model, mesh)))
    split = {path for path, place in places.items() if _plain(place.spec)}
    for placed in (shard(given, mesh), eqx.filter_jit(shard)(given, mesh)):
        count = 0
        for path, leaf in leaves_with_paths(eqx.filter(placed, eqx.is_array)):
            weight = next((weight for weight in split if path.endswith(f".{weight}") and leaf.ndim), None)
            if weight is None:
                assert leaf.is_fully_replicated, path
            else:
                assert leaf.sharding.is_equivalent_to(places[weight], leaf.ndim), path
                count += 1
        moments = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1}[optimizer]  # of Muon itself; its AdamW has two
        assert count >= (2 + moments) * len(split)
        assert eqx.tree_equal(jax.device_get(placed), jax.device_get(given))


def test_devices_of_a_command_line():
    assert dict(Devices().start().shape) == {"data": 8, "fsdp": 1, "model": 1}
    assert dict(Devices(mesh="model=2,data=4").start().shape) == {"data": 4, "fsdp": 1, "model": 2}


@pytest.mark.parametrize("mesh", ["data=4,fsdp", "data=4,data=2", "data=0", "data=4 fsdp=2", "tensor=8", "8"])
def test_a_mesh_that_can_not_be_read(mesh):
    with pytest.raises(ValueError, match=rf"--mesh {mesh}: expected sizes of data, fsdp and model, as in data=4"):
        Devices(mesh=mesh).start()


def test_a_mesh_of_other_devices():
    with pytest.raises(ValueError, match=r"data=4 x fsdp=1 x model=1 is 4, but there are 8 devices; choose sizes"):
        Devices(mesh="data=4").start()


@pytest.mark.parametrize("given", [{"coordinator": "localhost:1"}, {"processes": 2}, {"process": 0}], ids=str)
def test_other_processes_without_distributed(given):
    with pytest.raises(ValueError, match="--coordinator, --processes and --process need --distributed; add it"):
        Devices(**given).start()


def test_a_coordinator_without_a_port():
    with pytest.raises(ValueError, match="--coordinator localhost: expected HOST:PORT"):
        Devices(distributed=True, coordinator="localhost", processes=2, process=0).start()


@pytest.mark.parametrize("given", [{}, {"coordinator": "localhost:1"}], ids=str)
def test_distributed_with_too_little_known(given):
    """In a process of its own, for what it sets and because it comes before anything else."""
    call = f"from eqzoo.sharding import Devices; Devices(distributed=True, **{given}).start()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert re.fullmatch(
        r"ValueError: --distributed: no cluster says which processes there are \(.*\); "
        r"give each process --coordinator HOST:PORT --processes N --process I",
        last,
    )
