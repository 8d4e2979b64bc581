"""The pure scheduler: standard library only. No torch, no clock, no randomness, no I/O, no set or dict-order surprises.

Three verbs, two messages: ``Scheduler.submit(event)``, ``plan() -> StepPlan | None``, ``land(step, StepResult)``.
"""
