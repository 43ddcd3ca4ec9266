"""Exact Match and F1: worked by hand, and published predictions."""

import json
import lzma
from pathlib import Path

import pytest

from windlass.data.items import Question
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.evaluation.passes import Passes
from windlass.evaluation.squad import evaluate_squad, score
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel.ranks import alone
from windlass.recipe import Recipe


@pytest.mark.parametrize(
    ("prediction", "references", "exact", "overlap"),
    [
        ("Denver Broncos", ["Denver Broncos"], 1, 1),
        ("the Denver Broncos!", ["Denver  broncos"], 1, 1),  # article, punctuation, case, spaces
        ("An apple a day", ["apple day"], 1, 1),
        ("theatre", ["atre"], 0, 0),  # an article is a whole word
        ("the-cat", ["thecat"], 1, 1),  # punctuation goes first and leaves no space
        ("“Denver”", ["Denver"], 0, 0),  # only ASCII punctuation is removed
        ("in Santa Clara, California", ["Santa Clara"], 0, 2 * (2 / 4) * 1 / (2 / 4 + 1)),
        ("Denver", ["Carolina", "Denver Broncos", "Broncos"], 0, 2 / 3),  # the best of several
        ("cat cat dog", ["cat dog dog"], 0, 2 / 3),  # a bag: two words are shared, once each
        ("", ["Denver"], 0, 0),  # an empty prediction
        ("the", ["a"], 1, 0),  # both empty once normalised: exact, but no word is shared
        ("1,000", ["1000"], 1, 1),
        ("1 000", ["1000"], 0, 0),
    ],
)
def test_worked_by_hand(prediction, references, exact, overlap):
    result = score({"q": prediction}, {"q": references})
    assert result == {"exact_match": 100 * exact, "f1": pytest.approx(100 * overlap), "items": 1}


@pytest.mark.parametrize(
    ("file", "exact", "overlap"),
    [
        ("bert-ensemble", 86.2, 92.2),  # arXiv 1810.04805, table 2: BERT LARGE (Ens.+TriviaQA), dev
        # arXiv 1608.07905, table 2: Match-LSTM, Ans-Ptr (Boundary+Search+en), dev
        ("match-lstm-ensemble", 67.6, 76.8),
    ],
)
def test_scores_of_published_predictions(data_files, file, exact, overlap):
    """Answers of two models to all of dev-v1.1, see squad_predictions/README.md."""
    tree = json.loads((data_files / "squad" / "dev-v1.1.json").read_text(encoding="utf-8"))
    parts = [part for article in tree["data"] for part in article["paragraphs"]]
    questions = [question for part in parts for question in part["qas"]]
    packed = (Path(__file__).parent / "squad_predictions" / f"{file}.txt.xz").read_bytes()
    answers = lzma.decompress(packed).decode("utf-8").split("\n")[:-1]
    predictions = {q["id"]: text for q, text in zip(questions, answers, strict=True)}
    result = score(predictions, {q["id"]: [a["text"] for a in q["answers"]] for q in questions})
    assert (round(result["exact_match"], 1), round(result["f1"], 1)) == (exact, overlap)


def test_the_share_of_questions_whose_window_has_no_answer():
    recipe = Recipe.model_validate({"model": {"layers": 1, "heads": 1, "width": 8, "context": 128}})
    model = build_model(recipe, 257, device="cpu")
    initialise(model, 1)
    contexts = {"short": "a cat", "cut": "a cat " + "x" * 300, "far": "x" * 300 + " a cat"}
    questions = [Question(name, "Who?", context, ("cat",)) for name, context in contexts.items()]
    passes = Passes(model, alone(), byte_tokenizer())
    scores, predictions = evaluate_squad(passes, questions)
    assert scores["unanswerable"] == pytest.approx(100 / 3) and len(predictions) == 3
    assert "unanswerable" not in evaluate_squad(passes, questions[:2])[0]
