"""The data of a recipe: from sources to the batches of the loop. `locate`, `sources` and `records`
find and read items; `tokenizer`, `examples` and `chat` give their tokens; `prepare`, `encode` and
`shards` write them; `corpus`, `split`, `samples`, `mixture`, `order` and `loader` read them.
"""
