"""Draft -> tree, one builder per file. No model is loaded here."""
