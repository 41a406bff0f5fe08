"""Pure Flax models: the decoder, the text encoder, the KV cache and weights in and out."""
