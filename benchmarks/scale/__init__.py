"""Scale on paper: the predicted time of an update for 8 … 4096 workers, and the making of its program."""
