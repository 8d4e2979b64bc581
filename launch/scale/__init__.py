"""`launch dry-run`: worlds of up to 1024 ranks planned on one CPU."""
