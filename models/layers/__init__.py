"""The parts that decoder-only models share; each takes its weights' shapes from the config and owns its loading."""
