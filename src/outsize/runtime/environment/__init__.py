"""Who started this process, on which machine, and where the others are: one reader a launcher, no torch."""
