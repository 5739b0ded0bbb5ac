"""The race: seconds until the loss of a real training is low enough, on a real network."""
