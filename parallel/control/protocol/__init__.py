"""Pure state machines of leader and follower: what is agreed each step, and how a divergence is explained."""
