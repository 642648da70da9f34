"""Host half of the engine, without jax: scheduler, lanes, pages, prefix caches, drafts."""
