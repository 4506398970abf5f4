"""Generation: prompts through a model once, then a token a step from a cache that is laid out by rules. See docs/inference.md."""
