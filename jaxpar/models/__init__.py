"""Example models: a Llama in Flax NNX and a Vision Transformer in Linen, with their embedding lookup and losses."""
