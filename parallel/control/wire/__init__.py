"""Bytes on the wire: frames, their headers, checks and templates."""
