"""Loading: a checkpoint folder becomes parameters in their shards; conversion and export."""
