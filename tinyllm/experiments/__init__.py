"""Experiments on what theory says about language models: a model and parameters go in, rows of results come out."""
