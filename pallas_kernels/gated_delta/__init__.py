"""Recurrent states of the gated delta rule."""
