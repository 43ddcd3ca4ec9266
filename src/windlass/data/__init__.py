"""The data of a recipe, from sources to the batches of the loop. Each step has its word:

- `sources` and `files` read **items**: a text, or a record, with its place.
- `items` reads a record as an **example**: a conversation, a pair of texts, or a question.
- `chat` writes a conversation in **pieces**: texts and special tokens, with a **mark** for a loss.
- `tokenizer` turns pieces into tokens, and `encode` items into **rows** of marked tokens.
- `prepare` does this for a recipe. `recipe_sources` lists its sources and their directories, and
  `recipe_tokenizer` finds its tokenizer. `shards` stores the rows, and `external_shards` reads those
  of other tools.
- `open`: `split` divides the rows; `samples`, `mixture`, `order` and `loader` make batches.
"""
