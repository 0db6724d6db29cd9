"""Each way of training: what it needs, whether it fits, and why."""
