"""Models of the Hugging Face hub by name: their revision, their files, and ranges of their weights.

huggingface_hub makes the requests. It reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT, and
keeps files in the cache that other programs use as well. Its import takes a second, so that it is
imported only where a name is looked up.
"""
