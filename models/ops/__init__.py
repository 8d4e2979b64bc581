"""The op table: what a model is written in, and the rows that serve it on each kind of device."""
