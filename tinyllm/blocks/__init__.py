"""The halves of a block: their tensors are asked for here, and their ops recorded. `tinyllm.transformer` uses them."""
