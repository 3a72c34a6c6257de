"""By name, from a server, through the cache, into a model: what a user of `eqzoo.load` does first. Without torch."""

import hashlib
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants

import eqzoo
from eqzoo import _describe
from eqzoo.__main__ import main
from eqzoo.checkpoint import hub
from tests.server import Fault, serving_as_the_hub


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving_as_the_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture(scope="module")
def resnet():
    return eqzoo.create("resnet10t", num_classes=5, key=jax.random.key(0))


@pytest.fixture(scope="module")
def gpt2():
    return eqzoo.create("gpt2", dim=24, depth=2, heads=3, vocab=61, context=16, key=jax.random.key(0))


def assert_equal(loaded, pair):
    assert eqx.tree_equal(loaded, eqzoo.freeze(*pair))


def test_a_repository_of_timm(server, resnet, monkeypatch, capsys):
    folder = server.root / "timm" / "mine.v1"
    folder.parent.mkdir(parents=True)
    eqzoo.export(folder, *resnet, format="timm")
    assert_equal(eqzoo.load("timm/mine.v1"), resnet)
    adapted = eqzoo.load("timm/mine.v1", num_classes=3, in_channels=1)
    assert eqx.filter_eval_shape(adapted, jax.ShapeDtypeStruct((32, 32, 1), jnp.float32)).shape == (3,)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    requests = len(server.requests)
    assert_equal(eqzoo.load("timm/mine.v1"), resnet)
    assert len(server.requests) == requests
    assert main(["fetch", "timm/mine.v1"]) == 0
    assert_equal(eqzoo.load(capsys.readouterr().out.strip()), resnet)


def test_revisions(server, resnet):
    other = eqzoo.create("resnet10t", num_classes=5, key=jax.random.key(1))
    (server.root / "owner").mkdir(parents=True)
    eqzoo.export(server.root / "owner" / "net", *resnet, format="timm")
    eqzoo.export(server.root / "owner" / "net@v2", *other, format="timm")
    assert_equal(eqzoo.load("owner/net"), resnet)
    assert_equal(eqzoo.load("owner/net", revision="v2"), other)


def test_a_repository_of_transformers(server, gpt2):
    folder = server.root / "owner" / "tiny-gpt2"
    folder.parent.mkdir(parents=True)
    eqzoo.export(folder, *gpt2, format="transformers")
    assert_equal(eqzoo.load("owner/tiny-gpt2"), gpt2)


def test_a_repository_in_shards(server, gpt2):
    """Only the shards that the index names are downloaded."""
    whole = server.root / "owner" / "whole"
    folder = server.root / "owner" / "shards"
    folder.mkdir(parents=True)
    eqzoo.export(whole, *gpt2, format="transformers")
    tensors, _ = eqzoo.checkpoint.open_checkpoint(whole)
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[:7], names[7:])):
        shard = f"model-{number}.safetensors"
        eqzoo.checkpoint.write_safetensors(folder / shard, {name: tensors[name].read() for name in part}, {})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    (folder / "model-9.safetensors").touch()
    assert_equal(eqzoo.load("owner/shards"), gpt2)
    assert not any("model-9" in path for path in server.paths("GET"))


def test_a_repository_of_eqzoos_own(server, resnet):
    """One file, which says itself what it holds."""
    folder = server.root / "me" / "net"
    folder.mkdir(parents=True)
    eqzoo.save(folder / "model.safetensors", *resnet)
    assert_equal(eqzoo.load("me/net"), resnet)


def test_weights_of_torchvision(server, monkeypatch):
    """An image size that torchvision's name doesn't say comes from the facts; a hash that differs is refused."""
    pair = eqzoo.create("resnet18", key=jax.random.key(0))
    server.root.mkdir()
    eqzoo.export(server.root / "resnet18.pth", *pair, format="torchvision")
    digest = hashlib.sha256((server.root / "resnet18.pth").read_bytes()).hexdigest()
    facts = {
        f"resnet18.{tag}": {"url": f"{server.url}/resnet18.pth?{tag}", "sha256": start, "min_size": [1, 1]}
        for tag, start in {"V1": digest[:8], "V2": "0" * 8}.items()
    }
    monkeypatch.setattr(hub, "torchvision_facts", lambda: facts)
    monkeypatch.setattr(_describe, "torchvision_facts", lambda: facts)
    server.faults["/resnet18.pth"] = Fault(cut_after=100_000, times=1)
    assert_equal(eqzoo.load("torchvision/resnet18.V1"), pair)
    assert len(server.paths("GET")) == 2
    with pytest.raises(eqzoo.CheckpointError, match="should begin with 00000000"):
        eqzoo.load("torchvision/resnet18.V2")


def test_weights_of_torchvision_at_another_size(server, monkeypatch):
    facts = {"vit_b_16.BIG": {"min_size": [384, 384]}}
    monkeypatch.setattr(_describe, "torchvision_facts", lambda: facts)
    description = _describe.describe("torchvision/vit_b_16.BIG", server.root, {})
    assert description.config.image_size == 384


def test_preprocessing_of_a_repository(server):
    folder = server.root / "owner" / "net"
    folder.mkdir(parents=True)
    config = {"input_size": [3, 48, 48], "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": config}))
    (folder / "model.safetensors").touch()
    prepare = eqzoo.preprocessing("owner/net")
    assert prepare(np.full((60, 80, 3), 255, np.uint8)).shape == (48, 48, 3)
    assert not any("model" in path.rpartition("/")[2] for path in server.paths("GET"))


def test_names_that_lead_nowhere(server):
    with pytest.raises(ValueError, match="timm/resnet50.a1_in1k"):
        eqzoo.load("timm/resnet50.a1_in1")
    with pytest.raises(ValueError, match="resnet50 comes from .*timm/resnet50"):
        eqzoo.load("resnet50")
    with pytest.raises(FileNotFoundError, match="there is no file or folder 'missing/model.pth'"):
        eqzoo.load("missing/model.pth")
