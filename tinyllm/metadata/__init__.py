"""Readers of a file's hyperparameters, one for each concept. `tinyllm.config` puts them together."""
