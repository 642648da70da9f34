"""Faults that the tests have to notice: see __main__.py and mutants.toml."""
