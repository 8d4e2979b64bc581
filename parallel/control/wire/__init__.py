"""The wire format: frames, their validation, and frame templates."""
