"""scripts/generate.py, on a tiny model in transformers' folder and on one that train_lm.py left."""

import builtins
import re
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
import transformers

import eqzoo
from eqzoo import data, generation, tree
from tests.parity import randomise
from tests.scripts import load_script

SCRIPT = load_script("generate")
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
TEXT = b"The cat sat on the mat. The dog sat on the log. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    data.BPE.train([TEXT], 280).save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = transformers.LlamaConfig(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=[278, 279],
        pad_token_id=None,
    )
    model = randomise(transformers.LlamaForCausalLM(config).eval(), 0)
    model.save_pretrained(folder)
    return folder


def continuation(folder: Path, text: str, tokens: int) -> str:
    """Upstream's."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokenizer = data.Tokenizer.load(folder)
    ids = torch.from_numpy(tokenizer.encode(text)).long()[None]
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return tokenizer.decode(found[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_weights_are_rounded_as_asked(folder, capsys, dtype):
    SCRIPT.main(SCRIPT.Options(prompts=("The cat",), model=str(folder), max_tokens=12, dtype=dtype))
    model, tokenizer = eqzoo.load(folder), data.Tokenizer.load(folder)
    model = tree.quantize(model, "*") if dtype == "int8" else tree.cast(model, jnp.bfloat16)
    (expected,) = generation.generate(model, [tokenizer.encode("The cat")], 12)
    assert capsys.readouterr().out == f"The cat{tokenizer.decode(expected.tokens)}\n"


def test_prompts_go_on_as_upstreams_do_one_after_the_other(folder, capsys):
    SCRIPT.main(SCRIPT.Options(prompts=("The cat", "A dog sat"), model=str(folder), max_tokens=40))
    out, err = capsys.readouterr()
    first, second = (text + continuation(folder, text, 40) for text in ("The cat", "A dog sat"))
    assert out == f"{first}\n{second}\n"
    assert re.fullmatch(r"(\[first token after [\d.]+ s, then [\d.]+ tokens a second\]\n){2}", err)


def test_a_chat_is_written_by_the_template_until_an_empty_line(folder, capsys, monkeypatch):
    said = iter(["Why?", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(said))
    SCRIPT.main(SCRIPT.Options(prompts=("Hello",), model=str(folder), chat=True, system="Be kind.", max_tokens=12))
    out = capsys.readouterr().out
    chat = "system: Be kind.\nuser: Hello\nassistant:"
    first = continuation(folder, chat, 12)
    second = continuation(folder, f"{chat} {first}\nuser: Why?\nassistant:", 12)
    assert out == f"> Hello\n{first}\n{second}\n"


def test_what_ends_a_text_is_in_the_models_files(folder):
    assert SCRIPT.ends(str(folder), data.Tokenizer.load(folder)) == [278, 279]


def test_another_seed_draws_another_text(folder, capsys):
    def text(seed):
        sampling = generation.Sampling(temperature=1.0, top_k=50)
        SCRIPT.main(SCRIPT.Options(("The",), str(folder), max_tokens=20, sampling=sampling, seed=seed))
        return capsys.readouterr().out

    assert text(0) == text(0) != text(1)


def test_the_folder_of_a_run_is_enough(folder, tmp_path, capsys):
    config = eqzoo.GPT2Config(dim=16, depth=2, heads=2, vocab=280, context=64)
    eqzoo.save(tmp_path / "model.safetensors", eqx.filter_jit(eqzoo.GPT2)(config, key=jax.random.key(0)))
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    SCRIPT.main(SCRIPT.Options(("The",), str(tmp_path), max_tokens=5))
    assert capsys.readouterr().out.startswith("The")


def test_without_a_prompt_there_is_nothing_to_do(folder):
    with pytest.raises(ValueError, match="there is no prompt; write one behind the options, or pass --chat"):
        SCRIPT.main(SCRIPT.Options((), str(folder)))
