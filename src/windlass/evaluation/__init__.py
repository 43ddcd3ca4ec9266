"""Measurements and text of a saved model: loss, HellaSwag, SQuAD, lm-eval, generation.

Arguments of many functions here:
    ranks: The process group. All its ranks call the function together and make equally many forward
        passes, because a model with sharded parameters gathers them in every pass; a rank without
        work takes part with one token.
    autocast: Makes the context of the forward pass's arithmetic.
    poll: Whether to stop, asked between passes. If it is true on any rank, all stop after the same
        pass, with None.
"""
