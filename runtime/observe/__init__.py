"""What a run reports: counters and step timelines."""
