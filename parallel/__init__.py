"""What ranks share: layers that own a shard, the collectives between them, and how they agree (control).

This file stays empty of imports: it is executed on the way to parallel.control, which never loads torch.
"""
