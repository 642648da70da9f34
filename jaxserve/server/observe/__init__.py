"""Metrics, logs, traces and profiles of a server, for its operators."""
