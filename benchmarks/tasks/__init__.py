"""What training runs train: a model, its data, and what is measured on data that it has not seen."""
