"""Clock stamps, costs and roofs, and what becomes of them. `tinyllm.bench` measures with them."""
