"""State machines of leader and follower: what is agreed each step, and how disagreement is named."""
