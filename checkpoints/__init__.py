"""Checkpoint folders of Hugging Face and Orbax: what their files hold, validated; no models."""
