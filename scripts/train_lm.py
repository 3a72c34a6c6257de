"""Train any language model, with the whole loop in sight. For example:

python scripts/train_lm.py

python scripts/train_lm.py --options dim 384 depth 6 --steps 10000

python scripts/train_lm.py --data ~/books --tokenizer bytes

python scripts/train_lm.py --data ~/openwebtext --tokenizer ~/gpt2/tokenizer.json --model my_package.my_module:MyNet

python scripts/train_lm.py --resume runs/gpt2-1
"""

import functools
import math
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp

import eqzoo
from eqzoo import data, host, nn, sharding, train, tree

SMALL_GPT2 = {"dim": 256, "depth": 4, "heads": 4}
NO_DROPOUT = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0, "residual_dropout": 0.0}


@dataclass(frozen=True)
class Options:
    model: str = "gpt2"
    """A name from eqzoo.list_models(), or package.module:Class for your own; vocab and context are given to what takes
    them. `gpt2` is a small one, unless the options say otherwise."""
    options: dict[str, str] = field(default_factory=dict)
    """Changes to the model's config, as in `--options depth 6 residual_dropout 0.1`; there is no dropout by itself."""
    data: str = "python"
    """`python`, the source of Python's standard library; or a path: text, or tokens (.npy, or .bin of uint16)."""
    tokenizer: str = "bpe"
    """`bpe`, trained on the data; `bytes`; or the path of a tokenizer.json."""
    vocab: int = 8192
    """How many tokens a `bpe` has."""
    context: int = 256
    """How many tokens are predicted in a row, each from those before it."""
    steps: int = 1000
    batch_size: int = 8
    """Of all devices together."""
    accumulate: int = 1
    """Compute a batch in this many parts, one after the other, to save memory."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; its parameters stay float32."""
    remat: bool = False
    """Compute activations again on the way back instead of keeping them, to save memory."""
    ema: float = 0.0
    """Decay of an average of the weights, such as 0.999, to be evaluated in their place; 0: none."""
    eval_every: int | None = None
    """Steps from one evaluation, with a checkpoint and a sample, to the next; by default a tenth of all."""
    save_every: int | None = None
    """Steps from one checkpoint to the next, where evaluations are too rare for that."""
    sample: int = 100
    """How many tokens of a document of its own the model writes at each evaluation, to be printed; 0: none."""
    seed: int = 0
    optimizer: train.OptimizerOptions = train.OptimizerOptions(
        optimizer="muon", learning_rate=4e-3, weight_decay=0.1, schedule="linear", betas=(0.9, 0.95)
    )
    run: train.RunOptions = train.RunOptions()
    devices: sharding.Devices = sharding.Devices()


def main(options: Options) -> None:
    mesh = options.devices.start()
    saved = options.run.resume / "tokenizer.json" if options.run.resume else None
    tokenizer = saved if saved and saved.exists() else options.tokenizer
    train_data, test_data = data.load_text(
        options.data, tokenizer=tokenizer, vocab=options.vocab, context=options.context
    )
    tokenizer = train_data.tokenizer
    steps = options.steps
    eval_every = options.eval_every or max(1, steps // 10)
    save_every = options.save_every or eval_every

    key_model, key = jax.random.split(jax.random.key(options.seed))
    fitting = {"vocab": tokenizer.size, "context": options.context} | NO_DROPOUT
    if options.model == "gpt2":
        fitting |= SMALL_GPT2
    fitting = train.model_options(options.model, options.options, **fitting)
    model, state = eqzoo.create(options.model, key=key_model, **fitting)
    model = nn.scan_options(model, remat=options.remat)
    policy = train.Policy(options.compute)
    optimizer = options.optimizer.make(model, steps)
    train_state = train.TrainState.create(model, state, optimizer, key=key, ema=options.ema > 0)
    train_state = sharding.shard(train_state, mesh)

    run = train.Run(options.run, options)
    if isinstance(tokenizer, data.BPE):
        tokenizer.save(run.folder / "tokenizer.json")
    facts = {
        "data": options.data,
        "windows": len(train_data),
        "context": options.context,
        "batch_size": options.batch_size,
        "seed": options.seed,
    }
    checkpoints = train.Checkpoints(
        run.folder / "checkpoints", keep=options.run.keep, best="bits_per_byte", mode="min", facts=facts
    )
    train_state = checkpoints.restore(train_state)
    start = int(train_state.step)
    run.truncate(start)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    progress = train.Progress(
        steps, start=start, unit="tokens", per_step=options.batch_size * options.context, paths=tree.paths(parameters)
    )
    progress.say(
        f"{options.model}: {tree.count(parameters):,} parameters; {len(train_data.stream):,} training and "
        f"{len(test_data.stream):,} test tokens, of {tokenizer.size:,} kinds; devices: {mesh.size}"
    )

    def measure(logits, batch):
        """The loss of each token, and its mean for each token and for each byte."""
        losses = train.cross_entropy(logits, batch["tokens"][:, 1:])
        loss = train.Mean.of(losses, batch["weight"])
        bits_per_byte = train.Mean(loss.total / math.log(2), jnp.sum(batch["bytes"], dtype=jnp.float32))
        return losses, {"loss": loss, "bits_per_byte": bits_per_byte}

    def loss_fn(model, state, batch):
        forward = functools.partial(eqzoo.apply, policy.to_compute(model), state)
        inputs = batch["tokens"][:, :-1]
        logits, state = jax.vmap(forward, axis_name="batch", out_axes=(0, None))(inputs, key=batch["key"])
        losses, metrics = measure(logits, batch)
        return train.weighted_mean(losses, batch["weight"]), (state, metrics)

    @eqx.filter_jit(donate="all")
    @progress.count
    def train_step(train_state, batch):
        key = jax.random.fold_in(train_state.key, train_state.step)
        batch = batch | {"key": jax.random.split(key, options.batch_size)}
        gradient = train.accumulate(eqx.filter_value_and_grad(loss_fn, has_aux=True), options.accumulate)
        (_, (state, metrics)), grads = gradient(train_state.model, train_state.state, batch)
        parameters = eqx.filter(train_state.model, eqx.is_inexact_array)
        updates, opt_state = optimizer.update(grads, train_state.opt_state, parameters)
        model = eqx.apply_updates(train_state.model, updates)
        train_state = train_state.next(model, state, opt_state, grads, ema_decay=options.ema)
        return sharding.shard(train_state, mesh), metrics | {"skipped": train_state.skipped}

    @eqx.filter_jit
    def test_step(model, state, batch):
        predict = eqzoo.freeze(policy.to_compute(model), state)
        return measure(jax.vmap(predict)(batch["tokens"][:, :-1]), batch)[1]

    def evaluate(train_state):
        model, state = train_state.averaged
        batches = data.on_device(data.batches(test_data, options.batch_size, seed=None), mesh)
        totals = train.add_up(test_step(model, state, batch) for batch in batches)
        return {name: float(mean.value) for name, mean in totals.items()}

    @eqx.filter_jit
    def draw_tokens(model, state, key):
        """The first tokens of a document, each drawn by what the model expects after those before it."""
        predict = eqzoo.freeze(policy.to_compute(model), state)

        def draw(position, tokens):
            logits = predict(tokens)[position].astype(jnp.float32)
            token = jax.random.categorical(jax.random.fold_in(key, position), logits)
            return tokens.at[position + 1].set(token)

        length = min(options.sample + 1, options.context)
        tokens = jax.lax.fori_loop(0, length - 1, draw, jnp.full(length, tokenizer.end))
        return sharding.gather(tokens[1:], mesh)

    def sample(train_state):
        model, state = train_state.averaged
        tokens = jax.device_get(draw_tokens(model, state, jax.random.key(options.seed))).tolist()
        document = tokens[: tokens.index(tokenizer.end)] if tokenizer.end in tokens else tokens
        return tokenizer.decode(document).decode(errors="replace")

    batches = data.batches(train_data, options.batch_size, seed=options.seed, start=start, steps=steps)
    step = start
    with checkpoints, train.Stop() as stop, progress:
        for step, batch in enumerate(data.on_device(batches, mesh), start=start + 1):
            train_state, metrics = train_step(train_state, batch)
            progress.update(step, metrics)
            stopping, evaluating = stop.requested(step), step % eval_every == 0 or step == steps
            if evaluating or stopping or step % save_every == 0:
                scores = evaluate(train_state) if evaluating else {}
                progress.say(run.log(step, train=progress.means(), test=scores))
                checkpoints.save(train_state, scores)
            if evaluating and options.sample:
                progress.say(textwrap.indent(sample(train_state), "    "))
            if stopping:
                break
        if step == steps:
            train_state = checkpoints.restore(train_state, checkpoints.best)
    if step < steps:
        run.pause()
        progress.say(f"stopped; to go on: python {sys.argv[0]} --resume {run.folder}")
        return

    model, state = sharding.gather(train_state.averaged, mesh)
    if jax.process_index() == 0:
        eqzoo.save(run.folder / "model.safetensors", model, state)
        run.finish()
        bits = [record["test"]["bits_per_byte"] for record in run.records if record.get("test")]
        print(f"model.safetensors and curves.png are in {run.folder}")
        print(f"test {bits[-1]:.3f} bits per byte, at best {min(bits):.3f} (the model that was kept)")


if __name__ == "__main__":
    options = train.parse(Options, __doc__)
    host.tune()
    main(options)
