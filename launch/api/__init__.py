"""What generate and serve share: the schema of requests, their parser, and the form of responses."""
