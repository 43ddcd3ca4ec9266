"""Measurements and text of a saved model: loss, HellaSwag, SQuAD, lm-eval, generation.

All ranks of a group call a measurement together and make equally many forward passes, because a
model with sharded parameters gathers them in every pass; a rank without work takes part with one
token.
"""
