"""What only people who work on Lockstride run: the ratchet, drawings of documents, plots of measurements."""
