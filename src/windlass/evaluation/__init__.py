"""What a model knows: loss, generation, HellaSwag, SQuAD."""
