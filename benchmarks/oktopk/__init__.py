"""What Ok-Topk selects and delivers in a training, by its paper's rule and by the library's."""
