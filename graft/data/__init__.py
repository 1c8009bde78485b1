"""What lies on disk: prompts, responses, and the shards they are written in."""
