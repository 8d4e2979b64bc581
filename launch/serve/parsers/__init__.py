"""Tool calls in the text of answers: a file a format, and a table of them."""
