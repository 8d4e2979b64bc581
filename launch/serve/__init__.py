"""`serve`: an OpenAI-compatible server over one engine on all ranks."""
