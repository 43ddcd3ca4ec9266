"""The data of a recipe, from its sources to the batches of the loop. Read it in this order:

1. `prepare`: `recipe_sources`, `recipe_tokenizer` and `directory` say what it reads, with what, and
   where to; `sources` and `records` read items; `encode`, with `tokenizer`, `examples` and `chat`,
   turns them into tokens; `shards` writes them. `external_shards` checks shards of other tools.
2. `open`: `corpus` reads tokens and documents; `split` divides them; `samples` are rows of them.
3. `loader`: `order` and `mixture` choose the samples of each step.
"""
