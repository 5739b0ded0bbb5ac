"""Training in the lab that loses a worker and gains others."""
