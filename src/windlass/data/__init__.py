"""From a corpus to the tokens of a step: sources, tokenizers, shards, order, loader."""
