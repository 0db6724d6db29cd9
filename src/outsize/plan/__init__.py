"""The plan: plain data with a versioned JSON form."""
