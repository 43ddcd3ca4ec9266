"""What a saved model scores and writes: loss, HellaSwag, SQuAD, lm-eval, generated text.

Arguments that many functions of this room have:
    ranks: The process group; all its ranks call the function together, and make the same number of forward passes: a model
        whose parameters are sharded gathers them in every pass, so a rank without work takes part with one token.
    autocast: Makes the context of the forward pass's arithmetic.
    poll: Asked between passes whether to stop; where it is true on any rank, all stop after the same pass, and the result is None.
"""
