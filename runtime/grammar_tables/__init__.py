"""Regular grammars as tables of tokens, which the device reads by itself."""
