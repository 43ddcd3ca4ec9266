"""What a saved model scores and writes: loss, HellaSwag, SQuAD, lm-eval, generated text."""
