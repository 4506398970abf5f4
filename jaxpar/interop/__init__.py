"""Weights of other libraries: Hugging Face checkpoints in and out."""
