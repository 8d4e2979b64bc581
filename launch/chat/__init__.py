"""`chat`: a person at a terminal and a daemon."""
