"""The stages of sampling, and grammars. `tinyllm.sampler` puts them together."""
