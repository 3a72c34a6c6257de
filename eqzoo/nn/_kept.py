"""The name of what a `Stack` keeps for the backward pass beside its products and convolutions."""

KEPT = "kept"
