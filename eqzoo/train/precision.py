"""In which precision a model computes."""

from dataclasses import dataclass
from typing import Literal, TypeVar

from jaxtyping import PyTree

from eqzoo._types import check_choices
from eqzoo.tree.arithmetic import cast

Tree = TypeVar("Tree", bound=PyTree)


@dataclass(frozen=True)
class Policy:
    """Mixed precision: the parameters are float32, the model computes in `compute`. If the loss casts the model, its
    gradients come back in float32. It has to cast the model's input, too: half times float32 is float32.

    ```python
    policy = Policy("bfloat16")
    weight, image = jnp.ones(3), jnp.ones(3)
    loss = lambda weight: jnp.sum(policy.to_compute(weight) * policy.to_compute(image))
    str(jax.eval_shape(loss, weight).dtype), str(jax.grad(loss)(weight).dtype)  # ('bfloat16', 'float32')
    ```
    """

    compute: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. bfloat16 is faster on GPUs and TPUs; parameters, norms and losses stay in float32."""

    def __post_init__(self):
        check_choices(self)

    def to_compute(self, tree: Tree) -> Tree:
        """The float arrays of a tree in this precision; a Python number, such as a dropout rate, stays what it is."""
        return cast(tree, self.compute, keep=lambda path, leaf: isinstance(leaf, float))
