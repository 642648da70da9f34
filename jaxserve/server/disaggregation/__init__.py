"""Disaggregated prefill: one server computes a prompt's keys and values, another decodes from them.

`roles` says what a server does beside its own requests. A decode server asks `policy` which server
computes a prompt, and `remote_prefill` brings the pages from one of `prefill_pool` into its prefix
cache. A prefill server exports pages by `prefill_source`. `local_mesh` does the same between two
meshes of one process.
"""
