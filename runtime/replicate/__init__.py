"""Events on their way to all ranks: their encoding, and how many a turn announces."""
