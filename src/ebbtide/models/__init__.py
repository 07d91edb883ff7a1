"""From a recipe to a transformers model that packs, and its tokenizer."""
