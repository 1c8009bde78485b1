"""How many nodes a round is worth: one policy per file."""
