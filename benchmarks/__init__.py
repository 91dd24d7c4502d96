"""Every figure that the documentation quotes, one command each."""
