"""What a person starts: the only place that reads the command line and the environment, or opens user-facing files."""
