"""The data of a recipe: from sources to the batches of the loop.

- Which sources does a recipe name, and where are their tokens? `locate`
- Which items does a source have? `sources`, `files` (which ones), `records` (the items in them)
- What are the tokens of an item? `tokenizer`, `vocabulary` and `learn` (its origin),
  `examples` (conversations, questions), `chat` (their layout)
- How do they get to the disk? `prepare` (what is to do), `encode`, `shards`, `foreign`, `remote`
- What does a recipe read of them? `corpus`, `limits`, `split`
- What is a sample? `samples`, `documents`; in which order do they come? `order`, `mixture`
- How does the loop get them? `open`, `loader`; what are they in numbers? `describe`
- Which questions does the suite ask? `suite`
"""
