"""Parameter-server training: servers hold and update the parameters, workers pull, compute and push."""
