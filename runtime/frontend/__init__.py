"""Between callers and the engine: validation, tokenizing, chat templates, outputs as text."""
