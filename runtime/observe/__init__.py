"""What a run tells about itself: counters and step timelines."""
