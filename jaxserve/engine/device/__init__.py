"""Device half of the engine: compiled steps, their state, sampling and memory."""
