"""The Pale Transformer: the model, its cost and its fast paths."""
