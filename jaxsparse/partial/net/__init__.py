"""What both products share: messages, sockets and keys, the thread of a worker, and who is there."""
