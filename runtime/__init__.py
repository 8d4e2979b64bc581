"""One engine: events in, plans, steps on the device, tokens out. Every rank runs the same one.

This file stays empty of imports: it is executed on the way to runtime.schedule, which is standard library only.
"""
