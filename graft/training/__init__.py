"""Lightning modules and their data: the drafter (the scorer will join it)."""
