"""What is asked: questions, readers and the embedded world."""
