"""The command line: what it prints to whom, in which form, and how it exits."""

import json
import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqzoo
from eqzoo import __main__ as cli
from eqzoo._facts import timm_facts, torchvision_facts, transformers_facts
from eqzoo._model import _maker, _merge, _skeleton
from eqzoo._registry import variant
from eqzoo.checkpoint import Tensor, hub, open_checkpoint, unfill, write_safetensors


class Run:
    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *argv):
        """Exit code, standard output, standard error."""
        code = cli.main([str(argument) for argument in argv])
        return code, *self.capsys.readouterr()

    def document(self, *argv):
        code, out, _ = self(*argv, "--json")
        assert code == 0
        return json.loads(out)

    def failure(self, *argv):
        """The one sentence that a failing command says, and nothing else."""
        code, out, err = self(*argv)
        assert (code, out) == (1, "")
        assert err.startswith("eqzoo: ")
        assert err.count("\n") == 1
        return err


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    return Run(capsys)


def python(code):
    return [sys.executable, "-W", "error", "-c", code]


def zeros(name, **options):
    """A model and state that cost nothing to make."""
    fill = lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    return jax.tree.map(fill, _skeleton(_maker(name, options)))


def upstream_tensors(name, naming, **options):
    return unfill(_merge(*zeros(name, **options)), variant(name)[0].rules[naming])


@pytest.fixture(scope="module")
def deit(tmp_path_factory):
    path = tmp_path_factory.mktemp("deit") / "model.safetensors"
    write_safetensors(path, upstream_tensors("deit_tiny_patch16_224", "timm"), {})
    return path


# Usage


def test_help_needs_no_jax():
    """The package itself is left out, for what it imports is not the command line's to say."""
    code = f"""
import sys, types
package = types.ModuleType("eqzoo")
package.__path__ = {list(eqzoo.__path__)!r}
sys.modules["eqzoo"] = package
from eqzoo.__main__ import main
try:
    main(["--help"])
except SystemExit as exit:
    print(exit.code, {{"jax", "numpy", "rich"}} & set(sys.modules))
"""
    done = subprocess.run(python(code), capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 set()\n")


@pytest.mark.parametrize("command", ["list", "show", "fetch", "check", "convert", "runs"])
def test_every_command_has_help_with_an_example(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"example: {'cp' if command == 'fetch' else f'python -m eqzoo {command}'}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["lost"], ["show"], ["list", "--tree"], ["fetch", "a", "--dtype", "int8"]])
def test_wrong_usage_exits_with_2(capsys, argv):
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: python -m eqzoo" in err


def test_an_interrupt_exits_with_130(run, monkeypatch):
    def interrupted(source, revision):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "fetch", interrupted)
    assert run("fetch", "timm/resnet50.a1_in1k") == (130, "", "")


def test_a_reader_that_left_is_no_error():
    """Also where the output is still in a buffer when the command ends."""
    command = [sys.executable, "-m", "eqzoo", "list", "mlp", "--json"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.parametrize("command", [("list", "mlp"), ("show", "mlp")])
def test_without_rich_tables_say_what_to_install(run, monkeypatch, command):
    for module in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run.failure(*command) == "eqzoo: tables need rich: `pip install eqzoo[cli]`, or pass --json\n"
    assert run.document(*command)


# list


def test_list_shows_a_row_a_model(run):
    code, out, _ = run("list", "vit_?_16")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows == [
        ["name", "parameters", "input", "pretrained"],
        ["vit_b_16", "86,567,656", "224", "pixels", "3"],
        ["vit_l_16", "304,326,632", "224", "pixels", "3"],
    ]


def test_list_knows_models_of_any_size_of_tokens_and_without_weights(run):
    assert "any size" in run("list", "resnet18")[1]
    assert "1,024 tokens" in run("list", "gpt2")[1]
    assert run("list", "mlp")[1].splitlines()[1].split() == ["mlp", "669,706", "28", "pixels"]


def test_list_as_json_is_what_the_table_says(run):
    (model,) = run.document("list", "resnet101")
    assert model["name"] == "resnet101"
    assert model["parameters"] == 44_549_160
    assert (model["image_size"], model["context"]) == (None, None)
    assert "torchvision/resnet101.IMAGENET1K_V2" in model["sources"]


def test_each_published_checkpoint_belongs_to_exactly_one_model():
    listed = [each["source"] for name in eqzoo.list_models() for each in cli._sources(name)]
    published = [f"torchvision/{key}" for key in torchvision_facts()] + [f"timm/{key}" for key in timm_facts()]
    assert sorted(listed) == sorted([*published, *transformers_facts()])


@pytest.mark.parametrize("command", ["list", "show"])
def test_an_unknown_name_gives_near_misses(run, command):
    assert "no model named 'resnet51'; did you mean resnet50" in run.failure(command, "resnet51")


# show


def test_show_counts_a_resnet(run):
    model = run.document("show", "resnet50")
    assert model["parameters"] == 25_557_032
    assert model["memory"] == {"float32": 102_228_128, "bfloat16": 51_114_064}
    assert (model["macs"], model["flops"], model["activations"]) == (4_089_184_256, 8_178_368_512, 11_114_984)
    assert (model["input"], model["output"]) == ([224, 224, 3], [1000])
    assert model["stages"] == [[56, 56, 256], [28, 28, 512], [14, 14, 1024], [7, 7, 2048]]
    assert model["config"]["depths"] == [3, 4, 6, 3]
    assert model["paper"].startswith("ResNet (He et al., 2015, arXiv 1512.03385)")
    sources = {source.pop("source"): source for source in model["sources"]}
    published = {"top1": 80.858, "top5": 95.434, "licence": "BSD-3-Clause"}
    assert sources["torchvision/resnet50.IMAGENET1K_V2"] == published
    assert sources["timm/resnet50.a1_in1k"] == {"top1": None, "top5": None, "licence": "apache-2.0"}


def test_show_takes_a_language_model_at_its_full_context(run):
    model = run.document("show", "distilgpt2")
    assert (model["input"], model["method"], model["stages"]) == ([1024], "hidden", [[1024, 768]])
    code, out, _ = run("show", "distilgpt2")
    assert code == 0
    assert "1,024 tokens" in out


def test_show_takes_a_language_model_of_no_certain_context(run):
    model = run.document("show", "gru-small")
    assert (model["context"], model["input"], model["output"]) == (None, [1024], [1024, 10000])


def test_show_says_all_of_it_in_words(run):
    code, out, _ = run("show", "resnet50")
    assert code == 0
    fields = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    fields = {name: value.strip() for name, value in fields.items()}
    assert fields["parameters"] == "25,557,032"
    assert fields["memory"] == "97.5 MiB in float32, 48.7 MiB in bfloat16"
    assert (fields["MACs"], fields["FLOPs"], fields["activations"]) == ("4.09 G", "8.18 G", "11.11 M")
    assert fields["3"] == "7 x 7 x 2048"
    assert fields["block"] == "bottleneck"
    assert fields["torchvision/resnet50.IMAGENET1K_V2"].split() == ["80.858", "95.434", "BSD-3-Clause"]


def test_show_says_that_there_are_no_weights(run):
    assert run("show", "mlp")[1].endswith("\npretrained\nNo weights are published for it.\n")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_keep_to_the_terminals_width_and_lose_nothing(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("show", "vit_b_16")
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert all(name in out for name in variant("vit_b_16")[1].__dataclass_fields__)


def test_a_pipe_gets_whole_lines_without_colours(run):
    _, out, _ = run("show", "vit_b_16")
    assert "\x1b" not in out
    (line,) = (line for line in out.splitlines() if "SWAG_E2E_V1" in line)
    assert line.split() == [
        *("torchvision/vit_b_16.IMAGENET1K_SWAG_E2E_V1", "85.304", "97.65"),
        "https://github.com/facebookresearch/SWAG/blob/main/LICENSE",
    ]


# fetch


def test_fetch_prints_the_path_alone(run, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "fetch", lambda source, revision: tmp_path / source / (revision or "main"))
    assert run("fetch", "owner/name") == (0, f"{tmp_path}/owner/name/main\n", "")
    assert run("fetch", "owner/name", "--revision", "v2") == (0, f"{tmp_path}/owner/name/v2\n", "")
    assert run.document("fetch", "a/b") == {"source": "a/b", "path": f"{tmp_path}/a/b/main"}


def test_fetch_of_a_file_that_is_not_there_fails(run, tmp_path):
    assert "lost.pth" in run.failure("fetch", tmp_path / "lost.pth")


# check


def test_check_names_every_variant_that_fits(run, deit):
    assert run("check", deit) == (0, "vit_tiny_patch16_224\ndeit_tiny_patch16_224\n", "")
    document = run.document("check", deit, "--name", "deit_tiny_patch16_224")
    assert document == {"file": str(deit), "fits": ["deit_tiny_patch16_224"]}


def test_check_knows_a_model_that_was_trained_on_for_other_classes(run, tmp_path):
    write_safetensors(tmp_path / "ten.safetensors", upstream_tensors("resnet10t", "timm", num_classes=10), {})
    assert run("check", tmp_path / "ten.safetensors") == (0, "resnet10t with num_classes=10\n", "")


def test_check_reports_both_sides_of_the_nearest(run, tmp_path):
    tensors = upstream_tensors("vit_tiny_patch16_224", "timm", num_classes=10)
    del tensors["norm.bias"]
    write_safetensors(tmp_path / "ten.safetensors", tensors | {"surprise": np.zeros(3)}, {})
    code, out, err = run("check", tmp_path / "ten.safetensors")
    assert code == 1
    nearest = "vit_tiny_patch16_224 with num_classes=10"
    assert f"does not fit {nearest}: 1 missing, 1 unexpected, 0 of a wrong shape" in out
    assert all(text in out for text in ("norm.bias", "surprise"))
    assert err == f"eqzoo: {tmp_path / 'ten.safetensors'} does not fit {nearest}, which comes nearest\n"

    code, out, _ = run("check", tmp_path / "ten.safetensors", "--name", "vit_tiny_patch16_224", "--json")
    document = json.loads(out)
    assert code == 1
    assert (document["fits"], document["nearest"]) == ([], "vit_tiny_patch16_224")
    assert [len(document[side]) for side in ("missing", "unexpected", "wrong")] == [1, 1, 2]


@pytest.mark.parametrize("naming", ["transformers", "transformers_body"])
def test_tied_weights_and_buffers_are_part_of_a_fit(tmp_path, naming):
    tensors = upstream_tensors("distilgpt2", naming)
    prefix = "transformer." if naming == "transformers" else ""
    tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"]
    tensors |= {f"{prefix}h.{layer}.attn.bias": np.zeros((1, 1, 8, 8)) for layer in range(6)}
    stored = {key: Tensor(tensor.shape, tensor.dtype, lambda: tensor) for key, tensor in tensors.items()}
    matches = dict(cli._matches(tmp_path, None, stored, {}))
    assert [label for label, match in matches.items() if not match.plan.problems] == ["distilgpt2"]


def test_check_of_one_name_checks_that_alone(run, deit):
    assert run("check", deit, "--name", "vit_tiny_patch16_224") == (0, "vit_tiny_patch16_224\n", "")
    code, out, err = run("check", deit, "--name", "vit_tiny_patch16_384")
    assert code == 1
    assert "pos_embed: shape (1, 197, 192) in the file, (1, 577, 192) in the model" in out
    assert err == f"eqzoo: {deit} does not fit vit_tiny_patch16_384\n"


def test_a_file_of_our_own_says_what_it_holds(run, tmp_path):
    eqzoo.save(tmp_path / "a.safetensors", *zeros("mlp"))
    assert run("check", tmp_path / "a.safetensors") == (0, "mlp\n", "")
    eqzoo.save(tmp_path / "b.safetensors", *zeros("mlp", hidden=(8,), num_classes=3))
    assert run("check", tmp_path / "b.safetensors") == (0, "mlp with hidden=(8,), num_classes=3\n", "")


def test_a_folders_config_says_what_it_holds(run, tmp_path):
    eqzoo.export(tmp_path / "ten", *zeros("vit_tiny_patch16_384", num_classes=10), format="timm")
    assert run("check", tmp_path / "ten") == (0, "vit_tiny_patch16_384 with num_classes=10\n", "")


class Mine(eqx.Module):
    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jnp.zeros(3)


def test_a_model_of_ones_own_is_checked_by_its_class(run, tmp_path):
    write_safetensors(tmp_path / "mine.safetensors", {"weight": np.zeros(3, np.float32)}, {})
    name = f"{__name__}:Mine"
    assert run("check", tmp_path / "mine.safetensors", "--name", name) == (0, f"{name}\n", "")
    assert "no model has tensors named like weight" in run.failure("check", tmp_path / "mine.safetensors")


def test_what_is_no_checkpoint_fails_in_one_sentence(run, tmp_path):
    (tmp_path / "note.pth").write_text("not a checkpoint")
    assert "note.pth" in run.failure("check", tmp_path / "note.pth")
    assert "lost.pth" in run.failure("check", tmp_path / "lost.pth")


# convert


def test_convert_writes_our_own_format(run, tmp_path, deit):
    target = tmp_path / "own.safetensors"
    document = run.document("convert", deit, target, "--name", "deit_tiny_patch16_224", "--dtype", "bfloat16")
    assert document == {"path": str(target), "format": "own", "parameters": 5_717_416}
    tensors, metadata = open_checkpoint(target)
    assert json.loads(metadata["eqzoo"])["model"] == "ViT"
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}


def test_convert_goes_back_to_upstreams_format(run, tmp_path):
    tensors = upstream_tensors("resnet10t", "timm")
    generator = np.random.default_rng(0)
    tensors = {name: generator.normal(size=each.shape).astype(each.dtype) for name, each in tensors.items()}
    write_safetensors(tmp_path / "timm.safetensors", tensors, {})
    own, back = tmp_path / "own.safetensors", tmp_path / "back.safetensors"
    assert run("convert", tmp_path / "timm.safetensors", own, "--name", "resnet10t")[0] == 0
    assert run("convert", own, back, "--format", "timm") == (0, f"wrote 5,435,488 parameters to {back}\n", "")
    again, _ = open_checkpoint(back)
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name].read(), tensors[name]) for name in tensors)


def test_convert_says_why_it_cannot(run, tmp_path, deit):
    assert "doesn't say which model it holds" in run.failure("convert", deit, tmp_path / "x.safetensors")
    misfit = run.failure("convert", deit, tmp_path / "x.safetensors", "--name", "vit_tiny_patch16_384")
    assert "does not fit vit_tiny_patch16_384: 0 missing, 0 unexpected, 1 of a wrong shape" in misfit
    eqzoo.save(tmp_path / "mlp.safetensors", *zeros("mlp"))
    assert "timm" in run.failure("convert", tmp_path / "mlp.safetensors", tmp_path / "y.pth", "--format", "timm")
    assert not (tmp_path / "x.safetensors").exists()
