"""A rank that hangs or dies ends the job with a name: heartbeats, blame, crash reports, shutdown."""
