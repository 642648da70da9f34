"""Instructions, bytes and costs of a compiled step, read from its HLO text."""
