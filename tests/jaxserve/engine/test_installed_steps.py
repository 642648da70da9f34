"""Steps that come while an engine runs: launched empty first, then used by what runs already."""
