"""What the programs share at a terminal: flags, prompts from files and standard input, bars and
printers.
"""
