"""The engine: host/ plans steps in plain integers, device/ runs compiled steps."""
