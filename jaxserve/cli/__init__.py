"""Shared parts of the programs: flags, prompts from files and standard input, output, exits."""
