"""Mixture-of-experts decoders in Flax NNX: Mixtral, Qwen3-MoE and DeepSeek-V3, on the parts of the Llama."""
