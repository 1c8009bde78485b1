"""What lies on disk: prompts."""
