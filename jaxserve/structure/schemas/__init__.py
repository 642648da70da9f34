"""JSON schemas before the grammar library reads them: refused, or written with what it knows.

The process that checks grammars (worker.py) loads this room by its path; it imports nothing of the
rest of jaxserve. Paths in errors are JSON Pointers (RFC 6901) into the schema that the client sent.
"""
