"""What a saved model scores and writes: loss, HellaSwag, SQuAD, lm-eval, generated text."""

from windlass.evaluation.sampling import TextSampler, sample
from windlass.evaluation.suites import Evaluation, evaluate

__all__ = ["Evaluation", "TextSampler", "evaluate", "sample"]
