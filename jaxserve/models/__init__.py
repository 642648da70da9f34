"""One decoder for all families: its spec, attention, experts and quantized weights."""
