"""Parts that every request goes through: admission, service, engine thread, answer."""
